"""Among which ids vLLM drew each token, for the trainer to score it among the same.

vLLM 0.32 can return them itself, by a model runner that its CPU build does not have. There, the
sampler's last stage, which hands on the distribution that it draws from, is watched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.engine.protocol import Request
from spmdrl.engine.truncation import SampledRows, checked, kept_of
from spmdrl.engine.vllm_internals import model_runner
from spmdrl.engine.vllm_requests import RequestRecord, Unfinished, vocab_size, watch_sampler
from spmdrl.sampling_masks import SamplingMasks


def make_kept_source(llm: Any, *, on_cpu: bool) -> RequestRecord:
    """Return the source of sampling masks of an engine that was built with `kept_arguments`.

    It has no mask for a request that samples from the whole vocabulary."""
    return _Watched(model_runner(llm)) if on_cpu else _ReturnedSets(vocab_size(model_runner(llm)))


def kept_arguments(*, on_cpu: bool) -> dict[str, Any]:
    """Return the engine arguments that the sampling masks need."""
    # A finished request is read before the next step is drawn: else a token behind its last one
    # would be drawn too.
    return {"async_scheduling": False} if on_cpu else {"return_sampling_mask": True}


class _Watched(RequestRecord):
    """Sampling masks read off the sampler."""

    def __init__(self, runner: Any):
        self._ids: dict[str, str] = {}  # of truncated requests: vLLM's name by ours
        self._rows: dict[str, SampledRows] = {}  # by vLLM's
        watch_sampler(runner, self._take)

    def _take(self, request_ids: list[str], logprobs: Tensor) -> None:
        """Take the logprobs [N, V] that a step's tokens are drawn by."""
        step = SamplingMasks.of(logprobs != -torch.inf)
        for place, request_id in enumerate(request_ids):
            if request_id in self._rows:
                self._rows[request_id].append((step, place))

    def added(self, request: Request, request_id: str) -> None:
        if request.is_cut:
            self._ids[request.key], self._rows[request_id] = request_id, []

    def finished(self, key: str, output: Any, tokens: Tensor) -> SamplingMasks | None:
        if key not in self._ids:
            return None
        return kept_of(self._rows.pop(self._ids.pop(key)), tokens, key=key)

    def unfinished(self, request: Unfinished, tokens: Tensor) -> SamplingMasks | None:
        if request.key not in self._ids:
            return None
        return kept_of(self._rows[self._ids[request.key]], tokens, key=request.key)

    def drop(self, key: str) -> None:
        if key in self._ids:
            del self._rows[self._ids.pop(key)]


class _ReturnedSets(RequestRecord):
    """Sampling masks that vLLM itself returns."""

    def __init__(self, vocab: int):
        self._vocab = vocab
        self._keys: set[str] = set()  # of truncated requests

    def added(self, request: Request, request_id: str) -> None:
        if request.is_cut:
            self._keys.add(request.key)

    def finished(self, key: str, output: Any, tokens: Tensor) -> SamplingMasks | None:
        found = output.outputs[0].sampling_mask
        sets = self._ours(key, [] if found is None else found.token_ids, tokens)
        self._keys.discard(key)
        return sets

    def unfinished(self, request: Unfinished, tokens: Tensor) -> SamplingMasks | None:
        found = [ids for chunk in request.kept for ids in chunk.to_nested_list()]
        return self._ours(request.key, found, tokens)

    def drop(self, key: str) -> None:
        self._keys.discard(key)

    def _ours(self, key: str, ids: list[list[int]], tokens: Tensor) -> SamplingMasks | None:
        if key not in self._keys:
            return None
        sets = SamplingMasks.listed(ids, vocab=self._vocab) if ids else None
        return checked(sets, tokens, key=key)
