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
from spmdrl.engine.vllm.core_loop import CoreLoop, Drawn
from spmdrl.engine.vllm.internals import (
    SlotCache,
    model_runner,
    moe_layers,
    num_experts,
    watch_routers,
)
from spmdrl.engine.vllm.requests import vocab_size, watch_sampler
from spmdrl.sampling_masks import SamplingMasks


class TokenRecorder:
    """Records a column of completions: routes, or sampling masks."""

    def add(self, request: Request, drawn: Drawn) -> None:
        """Start to record a request."""

    def unfinished(self, drawn: Drawn, tokens: Tensor) -> TokenColumn | None:
        """Return the column of an unfinished request that has these tokens [n] int64; None if
        unknown."""
        raise NotImplementedError

    def finished(self, drawn: Drawn, tokens: Tensor) -> TokenColumn | None:
        """Return the column of a request that finished in this step."""
        return self.unfinished(drawn, tokens)

    def save(self, drawn: Drawn) -> None:
        """Copy what the KV cache holds of a request, which may lose its place there."""

    def drop(self, drawn: Drawn) -> None:
        """Forget a request that is finished or was aborted."""


# --------------------------------------------------------------------------- routes


def make_route_recorder(llm: Any, loop: CoreLoop, *, on_cpu: bool) -> TokenRecorder:
    """Return the recorder of routes, [n, L, K] of all tokens of a request but the last.

    Args:
        llm: vLLM's engine, built with the arguments that arguments.py adds for model.moe.replay.
        loop: of the engine. If it has several parts, these send the routes with the tokens.
    Raises: Refusal when this vLLM or this model cannot record them.
    """
    runner = model_runner(llm)
    layers = moe_layers(runner.get_model())
    dtype = route_dtype(num_experts(runner)[0])
    if not on_cpu:
        return _ReturnedRoutes(layers, dtype=dtype)
    own = _SlotRoutes(runner, layers)
    if loop.parts == 1:
        return own
    loop.read_routes = own.read
    return _ReturnedRoutes([*range(len(layers))], dtype=dtype)


class _SlotRoutes(TokenRecorder):
    """Routes in a buffer [slots, L, K] beside the KV cache."""

    def __init__(self, runner: Any, layers: list[int]):
        self._cache = SlotCache(runner)
        self._index = {layer: index for index, layer in enumerate(layers)}
        number, top_k = num_experts(runner)
        shape = (self._cache.num_slots, len(layers), top_k)
        self._chosen = torch.full(shape, -1, dtype=route_dtype(number))
        self._saved: dict[str, Tensor] = {}  # by vLLM's name
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

    def read(self, name: str, tokens: range) -> Any:
        """Return the routes of some tokens of a request as an array [n, L, K]; None if unknown."""
        slots = self._cache.of_request(name, tokens)
        return None if slots is None else self._chosen[slots].numpy()

    def finished(self, drawn: Drawn, tokens: Tensor) -> RouterRoutes:
        return _check_routes(drawn, self._first(drawn, _num_computed(drawn)))

    def unfinished(self, drawn: Drawn, tokens: Tensor) -> RouterRoutes | None:
        routes = self._of(drawn)
        return None if routes is None else RouterRoutes(routes)

    def _of(self, drawn: Drawn) -> Tensor | None:
        if not drawn.tokens:  # it has not begun: prompts are computed whole here
            return self._saved.get(drawn.name)
        return self._first(drawn, _num_computed(drawn))

    def save(self, drawn: Drawn) -> None:
        routes = self._of(drawn)
        if routes is not None:
            self._saved[drawn.name] = routes

    def drop(self, drawn: Drawn) -> None:
        self._saved.pop(drawn.name, None)

    def _first(self, drawn: Drawn, count: int) -> Tensor | None:
        """Return the routes of the first `count` tokens: the saved ones, then the cache's."""
        saved = self._saved.get(drawn.name)
        num_saved = 0 if saved is None else len(saved)
        if num_saved >= count:
            return saved
        slots = self._cache.of_request(drawn.name, range(num_saved, count))
        if slots is None:
            return saved
        routes = self._chosen[slots]
        return routes if saved is None else torch.cat([saved, routes])


class _ReturnedRoutes(TokenRecorder):
    """Routes that vLLM itself returns, of all layers."""

    def __init__(self, layers: list[int], *, dtype: torch.dtype):
        self._layers = layers
        self._dtype = dtype

    def finished(self, drawn: Drawn, tokens: Tensor) -> RouterRoutes:
        return _check_routes(drawn, self._of(drawn))

    def unfinished(self, drawn: Drawn, tokens: Tensor) -> RouterRoutes | None:
        routes = self._of(drawn)
        return None if routes is None else RouterRoutes(routes)

    def _of(self, drawn: Drawn) -> Tensor | None:
        if not drawn.routes:
            return None
        parts = [torch.from_numpy(part[:, self._layers].astype("int32")) for part in drawn.routes]
        return torch.cat(parts).to(self._dtype)


def _num_computed(drawn: Drawn) -> int:
    """Return how many tokens of a request the engine has read: all but the last."""
    return drawn.prompt_length + len(drawn.tokens) - 1


def _check_routes(drawn: Drawn, routes: Tensor | None) -> RouterRoutes:
    """Return the routes of a finished request.

    Raises: RuntimeError when some are missing.
    """
    count = _num_computed(drawn)
    if routes is None or len(routes) != count or bool((routes < 0).any()):
        known = 0 if routes is None else int((routes >= 0).flatten(1).all(dim=1).sum())
        raise RuntimeError(
            f"request {drawn.key}: vLLM's routers were seen to choose experts for "
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
        # By vLLM's name, of requests that are truncated.
        self._rows: dict[str, MaskRows] = {}
        watch_sampler(runner, self._take)

    def _take(self, request_ids: list[str], logprobs: Tensor) -> None:
        """Store the ids that a step's tokens are drawn among. logprobs: [N, V]."""
        masks = SamplingMasks.from_allowed(logprobs != -torch.inf)
        for row, request_id in enumerate(request_ids):
            if request_id in self._rows:
                self._rows[request_id].append((masks, row))

    def add(self, request: Request, drawn: Drawn) -> None:
        if request.is_cut:
            self._rows[drawn.name] = []

    def unfinished(self, drawn: Drawn, tokens: Tensor) -> SamplingMasks | None:
        rows = self._rows.get(drawn.name)
        return None if rows is None else masks_of_rows(rows, tokens, key=drawn.key)

    def finished(self, drawn: Drawn, tokens: Tensor) -> SamplingMasks | None:
        rows = self._rows.get(drawn.name)
        if rows is not None and drawn.drafts is not None:
            # vLLM drops the draft tokens that it accepted after the one that ends a request.
            del rows[len(tokens) :]
        return self.unfinished(drawn, tokens)

    def drop(self, drawn: Drawn) -> None:
        self._rows.pop(drawn.name, None)


class _ReturnedMasks(TokenRecorder):
    """Sampling masks that vLLM itself returns."""

    def __init__(self, vocab: int):
        self._vocab = vocab
        self._names: set[str] = set()  # vLLM's, of requests that are truncated

    def add(self, request: Request, drawn: Drawn) -> None:
        if request.is_cut:
            self._names.add(drawn.name)

    def unfinished(self, drawn: Drawn, tokens: Tensor) -> SamplingMasks | None:
        if drawn.name not in self._names:
            return None
        ids = [own for chunk in drawn.masks for own in chunk.to_nested_list()]
        masks = SamplingMasks.from_ids(ids, vocab=self._vocab) if ids else None
        return check_masks(masks, tokens, key=drawn.key)

    def drop(self, drawn: Drawn) -> None:
        self._names.discard(drawn.name)
