"""Make completions of vLLM's outputs, with versions, routes and sampling masks.

Stop strings are searched here, because vLLM's core does not decode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.columns import Columns, RouterRoutes
from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, Drafts, Request
from spmdrl.engine.stop_strings import make_stop_strings
from spmdrl.engine.vllm.core_loop import CoreLoop, Drawn
from spmdrl.engine.vllm.internals import ask_no_routes
from spmdrl.engine.vllm.records import TokenRecorder, make_mask_recorder, make_route_recorder
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.types import flat


class Outputs:
    """Steps an engine and returns completions.

    Args:
        loop: of the engine.
        llm: vLLM's engine.
        cfg: uses model.moe.replay and sampling.
        is_first: of its tensor-parallel group. The others record no routes.
    Raises: Refusal when this vLLM or this model cannot return what trainers need.
    """

    def __init__(self, loop: CoreLoop, llm: Any, cfg: Config, *, on_cpu: bool, is_first: bool):
        self._loop = loop
        self._recorders: dict[str, TokenRecorder] = {}  # by the key of their column
        if cfg.model.moe.replay and not is_first:
            ask_no_routes(llm)
        elif cfg.model.moe.replay:
            self._recorders[RouterRoutes.key] = make_route_recorder(llm, loop, on_cpu=on_cpu)
        if cfg.sampling.truncates:
            self._recorders[SamplingMasks.key] = make_mask_recorder(llm, on_cpu=on_cpu)
        self._stops = make_stop_strings(cfg)
        # {vLLM's name of a request: [(tokens that it had when weights were replaced, the version of
        # the old weights)]}
        self._replaced: dict[str, list[tuple[int, int]]] = {}

    def add(self, request: Request, drawn: Drawn) -> None:
        """Start to record a request."""
        for recorder in self._recorders.values():
            recorder.add(request, drawn)
        self._stops.add(request)

    def step(self, version: int) -> list[Completion]:
        """Run one scheduling step with weights of this version; return what finished in it."""
        completions = [self._finished(drawn, version) for drawn in self._loop.step()]
        if self._stops.are_sought:
            completions += self._stopped_by_strings(version)
        return completions

    def unfinished(self, version: int) -> list[Completion]:
        """Return what was drawn so far for unfinished requests, is_truncated False."""
        return [self._so_far(drawn, version) for drawn in self._loop.unfinished]

    def abort_all(self, version: int) -> list[Completion]:
        """End all requests and return what was drawn for them."""
        completions = self.unfinished(version)
        self._abort([*self._loop.unfinished])
        return completions

    def weights_replaced(self, version: int) -> None:
        """Note which tokens the weights of this version drew; they are replaced now."""
        for drawn in self._loop.unfinished:
            self._replaced.setdefault(drawn.name, []).append((len(drawn.tokens), version))
            for recorder in self._recorders.values():
                recorder.save(drawn)

    def _finished(self, drawn: Drawn, version: int) -> Completion:
        tokens = flat(drawn.tokens, "int64")
        columns = {}
        for name, recorder in self._recorders.items():
            if (column := recorder.finished(drawn, tokens)) is not None:
                columns[name] = column
        completion = self._completion(drawn, tokens, columns, version)
        end = self._stops.end(drawn.key, drawn.tokens)
        self._forget(drawn)
        return completion if end is None else completion.until(end)

    def _stopped_by_strings(self, version: int) -> list[Completion]:
        """End the requests that have reached a stop string, of which vLLM does not know."""
        completions = []
        stopped = []
        for drawn in self._loop.unfinished:
            end = self._stops.end(drawn.key, drawn.tokens)
            if end is not None:
                completions.append(self._so_far(drawn, version).until(end))
                stopped.append(drawn)
        self._abort(stopped)
        return completions

    def _abort(self, requests: list[Drawn]) -> None:
        self._loop.abort(requests)
        for drawn in requests:
            self._forget(drawn)

    def _so_far(self, drawn: Drawn, version: int) -> Completion:
        tokens = flat(drawn.tokens, "int64")
        columns = {}
        for name, recorder in self._recorders.items():
            if (column := recorder.unfinished(drawn, tokens)) is not None:
                columns[name] = column
        return self._completion(drawn, tokens, columns, version)

    def _completion(
        self, drawn: Drawn, tokens: Tensor, columns: Columns, version: int
    ) -> Completion:
        return Completion(
            drawn.key,
            tokens,
            flat(drawn.logprobs, "float32"),
            self._versions(drawn, version),
            is_truncated=drawn.is_truncated,
            extra_columns=columns,
            drafts=None if drawn.drafts is None else _drafts(drawn.drafts),
        )

    def _forget(self, drawn: Drawn) -> None:
        for recorder in self._recorders.values():
            recorder.drop(drawn)
        self._stops.drop(drawn.key)
        self._replaced.pop(drawn.name, None)

    def _versions(self, drawn: Drawn, version: int) -> Tensor:
        versions = torch.full((len(drawn.tokens),), version)
        for count, old in reversed(self._replaced.get(drawn.name, ())):
            versions[:count] = old
        return versions


def _drafts(metrics: Any) -> Drafts:
    """Return the counts of vLLM's RequestSpecDecodeMetrics."""
    accepted = sum(number * steps for number, steps in enumerate(metrics.histogram))
    return Drafts(metrics.num_draft_tokens, accepted, sum(metrics.histogram))
