"""What vLLM draws, made into completions: versions, routes, sampling masks, ends by strings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, Request
from spmdrl.engine.stop_strings import make_stop_strings
from spmdrl.engine.vllm_requests import RequestRecord, Unfinished, unfinished
from spmdrl.engine.vllm_routes import make_routes
from spmdrl.engine.vllm_sampling_masks import make_kept_source
from spmdrl.types import flat


class Outputs:
    """The requests of an engine that are under way, and those that finish.

    Args:
        llm: vLLM's engine.
        cfg: uses model.moe.replay and sampling.
    Raises: Refusal when this vLLM or this model cannot say what trainers are to know.
    """

    def __init__(self, llm: Any, cfg: Config, *, on_cpu: bool):
        self._llm = llm
        self._records: dict[str, RequestRecord] = {}  # by the column of a Completion
        if cfg.model.moe.replay:
            self._records["routes"] = make_routes(llm, on_cpu=on_cpu)
        if cfg.sampling.truncates:
            self._records["sampling_masks"] = make_kept_source(llm, on_cpu=on_cpu)
        self._stops = make_stop_strings(cfg)
        # {request: [(tokens drawn when these weights were replaced, their version)]}
        self._replaced: dict[str, list[tuple[int, int]]] = {}
        self.returns_masks = cfg.sampling.truncates and not on_cpu
        """See vllm_requests.sampling_params."""

    def added(self, request: Request, request_id: str) -> None:
        """Take up a request, which vLLM calls so."""
        for record in self._records.values():
            record.added(request, request_id)
        self._stops.added(request)

    def step(self, version: int) -> list[Completion]:
        """Run one scheduling step, by weights of this version, and return what finished in it."""
        found = [self._finished(one, version) for one in self._llm.step() if one.finished]
        return found + self._at_strings(version)

    def unfinished(self, version: int) -> list[Completion]:
        """Return what was drawn so far for the requests that go on, is_truncated False."""
        return [self._so_far(request, version) for request in unfinished(self._llm)]

    def take_back(self, version: int) -> list[Completion]:
        """End the requests that go on, and return what was drawn for them."""
        found = self.unfinished(version)
        for completion in found:
            self._abort(completion.key)
        return found

    def replaced(self, version: int) -> None:
        """Note that the weights, of this version, are replaced."""
        for request in unfinished(self._llm):
            self._replaced.setdefault(request.key, []).append((len(request.tokens), version))
            for record in self._records.values():
                record.keep(request)

    def _finished(self, output: Any, version: int) -> Completion:
        sample = output.outputs[0]
        key = output.request_id
        tokens = flat(sample.token_ids, "int64")
        records = self._records.items()
        made = Completion(
            key,
            tokens,
            flat(sample.logprobs.logprobs, "float32"),
            self._versions(key, len(tokens), version),
            is_truncated=sample.finish_reason == "length",
            **{name: record.finished(key, output, tokens) for name, record in records},
        )
        end = self._stops.end(key, sample.token_ids)
        self._forget(key)
        return made if end is None else made.until(end)

    def _at_strings(self, version: int) -> list[Completion]:
        """End the requests that have come to a stop string, which vLLM knows nothing of."""
        found = []
        for request in unfinished(self._llm) if self._stops.are_sought else ():
            end = self._stops.end(request.key, request.tokens)
            if end is not None:
                found.append(self._so_far(request, version).until(end))
        for completion in found:
            self._abort(completion.key)
        return found

    def _abort(self, key: str) -> None:
        self._llm.abort_request([key])
        for record in self._records.values():
            record.drop(key)
        self._forget(key)

    def _so_far(self, request: Unfinished, version: int) -> Completion:
        tokens = flat(request.tokens, "int64")
        records = self._records.items()
        return Completion(
            request.key,
            tokens,
            flat(request.logprobs, "float32"),
            self._versions(request.key, len(tokens), version),
            is_truncated=False,
            **{name: record.unfinished(request, tokens) for name, record in records},
        )

    def _forget(self, key: str) -> None:
        self._stops.drop(key)
        self._replaced.pop(key, None)

    def _versions(self, key: str, drawn: int, version: int) -> Tensor:
        versions = torch.full((drawn,), version)
        for count, old in reversed(self._replaced.get(key, ())):
            versions[:count] = old
        return versions
