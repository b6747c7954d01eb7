"""What vLLM decides for each token that trainers need: experts' routes and sampling masks.

vLLM 0.32 can return both itself, but only with a model runner that its CPU build does not have.
There, hooks on the routers write into a buffer of ours, keyed by the KV cache's slots: a token's
route is stored where its keys and values are, whichever request computed them. The sampler's last
stage, which returns the distribution that it draws from, is watched.

Shape letters: n tokens, L layers with experts, K experts per token, N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.columns import RouterRoutes, TokenColumn
from spmdrl.engine.protocol import MaskRows, Request, check_masks, masks_of_rows, route_dtype
from spmdrl.engine.vllm.internals import (
    SlotCache,
    model_runner,
    moe_layers,
    num_experts,
    watch_routers,
)
from spmdrl.engine.vllm.requests import Unfinished, vocab_size, watch_sampler
from spmdrl.sampling_masks import SamplingMasks


class TokenRecorder:
    """Records a column of completions: routes, or sampling masks."""

    def add(self, request: Request, request_id: str) -> None:
        """Start to record a request. `request_id`: vLLM's name for it."""

    def finished(self, key: str, output: Any, tokens: Tensor) -> TokenColumn | None:
        """Return the column of a request that finished in this step with tokens [n] int64."""
        raise NotImplementedError

    def unfinished(self, request: Unfinished, tokens: Tensor) -> TokenColumn | None:
        """Return the column of an unfinished request that has these tokens; None if unknown."""
        raise NotImplementedError

    def save(self, request: Unfinished) -> None:
        """Copy what the KV cache holds of a request, which may lose its place there."""

    def drop(self, key: str) -> None:
        """Forget a request that was aborted."""


# --------------------------------------------------------------------------- routes


def make_route_recorder(llm: Any, *, on_cpu: bool) -> TokenRecorder:
    """Return the recorder of routes, [n, L, K] of all tokens of a request but the last.

    Args:
        llm: vLLM's engine, built with the arguments that arguments.py adds for model.moe.replay.
    Raises: Refusal when this vLLM or this model cannot record them.
    """
    runner = model_runner(llm)
    layers = moe_layers(runner.get_model())
    if on_cpu:
        return _SlotRoutes(runner, layers)
    return _ReturnedRoutes(layers, dtype=route_dtype(num_experts(runner)[0]))


class _SlotRoutes(TokenRecorder):
    """Routes in a buffer [slots, L, K] beside the KV cache."""

    def __init__(self, runner: Any, layers: list[int]):
        self._cache = SlotCache(runner)
        self._index = {layer: index for index, layer in enumerate(layers)}
        number, top_k = num_experts(runner)
        shape = (self._cache.num_slots, len(layers), top_k)
        self._chosen = torch.full(shape, -1, dtype=route_dtype(number))
        self._ids: dict[str, str] = {}  # {key: vLLM's name}
        self._saved: dict[str, Tensor] = {}  # by key
        watch_routers(runner.get_model(), self)

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Store what a layer's router chose for the step's tokens, [n, K]. vLLM calls it."""
        slots = self._cache.of_step()
        if slots is None:
            return
        slots = slots[: len(topk_ids)]
        is_real = slots >= 0
        chosen = topk_ids[is_real].to(self._chosen.dtype)
        self._chosen[slots[is_real], self._index[layer_id]] = chosen

    def add(self, request: Request, request_id: str) -> None:
        self._ids[request.key] = request_id

    def finished(self, key: str, output: Any, tokens: Tensor) -> RouterRoutes:
        count = _num_computed(output)
        routes = self._first(key, count)
        self.drop(key)
        return _check_routes(key, routes, count=count)

    def unfinished(self, request: Unfinished, tokens: Tensor) -> RouterRoutes | None:
        routes = self._of(request)
        return None if routes is None else RouterRoutes(routes)

    def _of(self, request: Unfinished) -> Tensor | None:
        if not request.tokens:  # it has not begun: prompts are computed whole here
            return self._saved.get(request.key)
        return self._first(request.key, request.prompt_length + len(request.tokens) - 1)

    def save(self, request: Unfinished) -> None:
        routes = self._of(request)
        if routes is not None:
            self._saved[request.key] = routes

    def drop(self, key: str) -> None:
        del self._ids[key]
        self._saved.pop(key, None)

    def _first(self, key: str, count: int) -> Tensor | None:
        """Return the routes of the first `count` tokens: the saved ones, then the cache's."""
        saved = self._saved.get(key)
        num_saved = 0 if saved is None else len(saved)
        if num_saved >= count:
            return saved
        slots = self._cache.of_request(self._ids[key], range(num_saved, count))
        if slots is None:
            return saved
        routes = self._chosen[slots]
        return routes if saved is None else torch.cat([saved, routes])


class _ReturnedRoutes(TokenRecorder):
    """Routes that vLLM itself returns, of all layers."""

    def __init__(self, layers: list[int], *, dtype: torch.dtype):
        self._layers = layers
        self._dtype = dtype

    def finished(self, key: str, output: Any, tokens: Tensor) -> RouterRoutes:
        returned = output.outputs[0].routed_experts
        routes = None if returned is None else self._join([returned])
        return _check_routes(key, routes, count=_num_computed(output))

    def unfinished(self, request: Unfinished, tokens: Tensor) -> RouterRoutes | None:
        return RouterRoutes(self._join(request.routes)) if request.routes else None

    def _join(self, chunks: Any) -> Tensor:
        parts = [torch.from_numpy(chunk[:, self._layers].astype("int32")) for chunk in chunks]
        return torch.cat(parts).to(self._dtype)


def _num_computed(output: Any) -> int:
    """Return how many tokens of a finished request the engine has read: all but the last."""
    return len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1


def _check_routes(key: str, routes: Tensor | None, *, count: int) -> RouterRoutes:
    """Return routes of `count` tokens.

    Raises: RuntimeError when some are missing.
    """
    if routes is None or len(routes) != count or bool((routes < 0).any()):
        known = 0 if routes is None else int((routes >= 0).flatten(1).all(dim=1).sum())
        raise RuntimeError(
            f"request {key}: vLLM's routers were seen to choose experts for "
            f"{known} of its {count} tokens; set model.moe.replay to false"
        )
    return RouterRoutes(routes)


# --------------------------------------------------------------------------- sampling masks


def make_mask_recorder(llm: Any, *, on_cpu: bool) -> TokenRecorder:
    """Return the recorder of sampling masks. It has none for a request that samples from the whole
    vocabulary.

    Args:
        llm: vLLM's engine, built with the arguments that arguments.py adds for such sampling.
    """
    runner = model_runner(llm)
    return _WatchedMasks(runner) if on_cpu else _ReturnedMasks(vocab_size(runner))


class _WatchedMasks(TokenRecorder):
    """Sampling masks read off the sampler."""

    def __init__(self, runner: Any):
        self._ids: dict[str, str] = {}  # {key of a request that is truncated: vLLM's name}
        self._rows: dict[str, MaskRows] = {}  # by vLLM's name
        watch_sampler(runner, self._take)

    def _take(self, request_ids: list[str], logprobs: Tensor) -> None:
        """Store the ids that a step's tokens are drawn among. logprobs: [N, V]."""
        masks = SamplingMasks.from_allowed(logprobs != -torch.inf)
        for row, request_id in enumerate(request_ids):
            if request_id in self._rows:
                self._rows[request_id].append((masks, row))

    def add(self, request: Request, request_id: str) -> None:
        if request.is_cut:
            self._ids[request.key] = request_id
            self._rows[request_id] = []

    def finished(self, key: str, output: Any, tokens: Tensor) -> SamplingMasks | None:
        masks = self._masks(key, tokens)
        self.drop(key)
        return masks

    def unfinished(self, request: Unfinished, tokens: Tensor) -> SamplingMasks | None:
        return self._masks(request.key, tokens)

    def drop(self, key: str) -> None:
        if key in self._ids:
            del self._rows[self._ids.pop(key)]

    def _masks(self, key: str, tokens: Tensor) -> SamplingMasks | None:
        if key not in self._ids:
            return None
        return masks_of_rows(self._rows[self._ids[key]], tokens, key=key)


class _ReturnedMasks(TokenRecorder):
    """Sampling masks that vLLM itself returns."""

    def __init__(self, vocab: int):
        self._vocab = vocab
        self._keys: set[str] = set()  # of requests that are truncated

    def add(self, request: Request, request_id: str) -> None:
        if request.is_cut:
            self._keys.add(request.key)

    def finished(self, key: str, output: Any, tokens: Tensor) -> SamplingMasks | None:
        returned = output.outputs[0].sampling_mask
        masks = self._masks(key, [] if returned is None else returned.token_ids, tokens)
        self._keys.discard(key)
        return masks

    def unfinished(self, request: Unfinished, tokens: Tensor) -> SamplingMasks | None:
        ids = [own for chunk in request.masks for own in chunk.to_nested_list()]
        return self._masks(request.key, ids, tokens)

    def drop(self, key: str) -> None:
        self._keys.discard(key)

    def _masks(self, key: str, ids: list[list[int]], tokens: Tensor) -> SamplingMasks | None:
        if key not in self._keys:
            return None
        masks = SamplingMasks.from_ids(ids, vocab=self._vocab) if ids else None
        return check_masks(masks, tokens, key=key)
