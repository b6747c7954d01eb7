"""Completions made of vLLM's outputs: with versions, routes, sampling masks and stop strings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.columns import RouterRoutes
from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, Request
from spmdrl.engine.stop_strings import make_stop_strings
from spmdrl.engine.vllm.records import TokenRecorder, make_mask_recorder, make_route_recorder
from spmdrl.engine.vllm.requests import Unfinished, unfinished
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.types import flat


class Outputs:
    """Steps an engine and returns completions.

    Args:
        llm: vLLM's engine.
        cfg: uses model.moe.replay and sampling.
    Raises: Refusal when this vLLM or this model cannot return what trainers need.
    """

    def __init__(self, llm: Any, cfg: Config, *, on_cpu: bool):
        self._llm = llm
        self._recorders: dict[str, TokenRecorder] = {}  # by the key of their column
        if cfg.model.moe.replay:
            self._recorders[RouterRoutes.key] = make_route_recorder(llm, on_cpu=on_cpu)
        if cfg.sampling.truncates:
            self._recorders[SamplingMasks.key] = make_mask_recorder(llm, on_cpu=on_cpu)
        self._stops = make_stop_strings(cfg)
        # {request: [(tokens drawn when weights were replaced, the version of these weights)]}
        self._replaced: dict[str, list[tuple[int, int]]] = {}
        self.returns_masks = cfg.sampling.truncates and not on_cpu
        """See requests.sampling_params."""

    def add(self, request: Request, request_id: str) -> None:
        """Start to record a request. `request_id`: vLLM's name for it."""
        for recorder in self._recorders.values():
            recorder.add(request, request_id)
        self._stops.add(request)

    def step(self, version: int) -> list[Completion]:
        """Run one scheduling step, by weights of this version, and return what finished in it."""
        completions = []
        for output in self._llm.step():
            if output.finished:
                completions.append(self._finished(output, version))
        if self._stops.are_sought:
            completions += self._stopped_by_strings(version)
        return completions

    def unfinished(self, version: int) -> list[Completion]:
        """Return what was drawn so far for unfinished requests, is_truncated False."""
        return [self._so_far(request, version) for request in unfinished(self._llm)]

    def abort_all(self, version: int) -> list[Completion]:
        """End all requests and return what was drawn for them."""
        completions = self.unfinished(version)
        for completion in completions:
            self._abort(completion.key)
        return completions

    def weights_replaced(self, version: int) -> None:
        """Note that the weights of this version are replaced now."""
        for request in unfinished(self._llm):
            self._replaced.setdefault(request.key, []).append((len(request.tokens), version))
            for recorder in self._recorders.values():
                recorder.save(request)

    def _finished(self, output: Any, version: int) -> Completion:
        sample = output.outputs[0]
        key = output.request_id
        tokens = flat(sample.token_ids, "int64")
        columns = {}
        for name, recorder in self._recorders.items():
            if (column := recorder.finished(key, output, tokens)) is not None:
                columns[name] = column
        completion = Completion(
            key,
            tokens,
            flat(sample.logprobs.logprobs, "float32"),
            self._versions(key, len(tokens), version),
            is_truncated=sample.finish_reason == "length",
            extra_columns=columns,
        )
        end = self._stops.end(key, sample.token_ids)
        self._forget(key)
        return completion if end is None else completion.until(end)

    def _stopped_by_strings(self, version: int) -> list[Completion]:
        """End the requests that have reached a stop string. vLLM is not told of these."""
        completions = []
        for request in unfinished(self._llm):
            end = self._stops.end(request.key, request.tokens)
            if end is not None:
                completions.append(self._so_far(request, version).until(end))
        for completion in completions:
            self._abort(completion.key)
        return completions

    def _abort(self, key: str) -> None:
        self._llm.abort_request([key])
        for recorder in self._recorders.values():
            recorder.drop(key)
        self._forget(key)

    def _so_far(self, request: Unfinished, version: int) -> Completion:
        tokens = flat(request.tokens, "int64")
        columns = {}
        for name, recorder in self._recorders.items():
            if (column := recorder.unfinished(request, tokens)) is not None:
                columns[name] = column
        return Completion(
            request.key,
            tokens,
            flat(request.logprobs, "float32"),
            self._versions(request.key, len(tokens), version),
            is_truncated=False,
            extra_columns=columns,
        )

    def _forget(self, key: str) -> None:
        self._stops.drop(key)
        self._replaced.pop(key, None)

    def _versions(self, key: str, num_tokens: int, version: int) -> Tensor:
        versions = torch.full((num_tokens,), version)
        for count, old in reversed(self._replaced.get(key, ())):
            versions[:count] = old
        return versions
