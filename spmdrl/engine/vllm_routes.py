"""Which experts vLLM's routers choose, token by token, for the trainer to replay.

vLLM 0.32 can return them itself, by a model runner that its CPU build does not have. There, its
hooks on the routers write into a buffer of ours, keyed by the KV cache's slots: a token's route is
where its keys and values are, whichever request computed them.

Shape letters: n tokens, L layers with experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.engine.protocol import Request, route_dtype
from spmdrl.engine.vllm_internals import (
    SlotCache,
    model_runner,
    moe_layers,
    num_experts,
    watch_routers,
)
from spmdrl.engine.vllm_requests import RequestRecord, Unfinished


def make_routes(llm: Any, *, on_cpu: bool) -> RequestRecord:
    """Return what knows the routes of an engine: [n, L, K] of all tokens but the last of a request
    that is finished, and of those that are known of another, None for none.

    Args:
        llm: vLLM's engine; off the CPU built with `route_arguments`.
    Raises: Refusal when this vLLM or this model cannot record them.
    """
    runner = model_runner(llm)
    layers = moe_layers(runner.get_model())
    if not on_cpu:
        return _Returned(layers, dtype=route_dtype(num_experts(runner)[0]))
    found = _BySlot(runner, layers)
    watch_routers(runner.get_model(), found)
    return found


def route_arguments(*, on_cpu: bool) -> dict[str, Any]:
    """Return the engine arguments that recording needs."""
    # A finished request is read before the next step is scheduled. With it on, a stop token leaves
    # a step behind, and vLLM's own recorder (0.32) fails at the next one.
    return {"async_scheduling": False} | ({} if on_cpu else {"enable_return_routed_experts": True})


class _BySlot(RequestRecord):
    """Routes in a buffer [slots, L, K] beside the KV cache."""

    def __init__(self, runner: Any, layers: list[int]):
        self._cache = SlotCache(runner)
        self._place = {layer: place for place, layer in enumerate(layers)}
        number, chosen = num_experts(runner)
        shape = (self._cache.num_slots, len(layers), chosen)
        self._chosen = torch.full(shape, -1, dtype=route_dtype(number))
        self._ids: dict[str, str] = {}  # by key
        self._kept: dict[str, Tensor] = {}

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Take what a layer's router chose for the step's tokens, [n, K]."""
        slots = self._cache.of_step()
        if slots is None:
            return
        slots = slots[: len(topk_ids)]
        real = slots >= 0
        self._chosen[slots[real], self._place[layer_id]] = topk_ids[real].to(self._chosen.dtype)

    def added(self, request: Request, request_id: str) -> None:
        self._ids[request.key] = request_id

    def finished(self, key: str, output: Any, tokens: Tensor) -> Tensor:
        count = _num_computed(output)
        routes = self._so_far(key, count)
        self.drop(key)
        return _checked(key, routes, count=count)

    def unfinished(self, request: Unfinished, tokens: Tensor) -> Tensor | None:
        return self._of(request)

    def keep(self, request: Unfinished) -> None:
        routes = self._of(request)
        if routes is not None:
            self._kept[request.key] = routes

    def drop(self, key: str) -> None:
        del self._ids[key]
        self._kept.pop(key, None)

    def _of(self, request: Unfinished) -> Tensor | None:
        if not request.tokens:  # prompts are computed whole here: it has not begun
            return self._kept.get(request.key)
        return self._so_far(request.key, request.prompt_length + len(request.tokens) - 1)

    def _so_far(self, key: str, count: int) -> Tensor | None:
        """Return the routes that were kept, and behind them what the cache has."""
        kept = self._kept.get(key)
        begin = 0 if kept is None else len(kept)
        if begin >= count:
            return kept
        slots = self._cache.of_request(self._ids[key], range(begin, count))
        if slots is None:
            return kept
        found = self._chosen[slots]
        return found if kept is None else torch.cat([kept, found])


def _num_computed(output: Any) -> int:
    """Return the tokens of a finished request that the engine has read: all but the last."""
    return len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1


def _checked(key: str, routes: Tensor | None, *, count: int) -> Tensor:
    """Return routes of `count` tokens. Raises: RuntimeError when these are not."""
    if routes is None or len(routes) != count or bool((routes < 0).any()):
        known = 0 if routes is None else int((routes >= 0).flatten(1).all(dim=1).sum())
        raise RuntimeError(
            f"request {key}: vLLM's routers were seen to choose experts for "
            f"{known} of its {count} tokens; set model.moe.replay to false"
        )
    return routes


class _Returned(RequestRecord):
    """Routes that vLLM itself returns, of all layers, for those with experts."""

    def __init__(self, layers: list[int], *, dtype: torch.dtype):
        self._layers = layers
        self._dtype = dtype

    def finished(self, key: str, output: Any, tokens: Tensor) -> Tensor:
        found = output.outputs[0].routed_experts
        routes = None if found is None else self._ours([found])
        return _checked(key, routes, count=_num_computed(output))

    def unfinished(self, request: Unfinished, tokens: Tensor) -> Tensor | None:
        return self._ours(request.routes) if request.routes else None

    def _ours(self, chunks: Any) -> Tensor:
        parts = [torch.from_numpy(part[:, self._layers].astype("int32")) for part in chunks]
        return torch.cat(parts).to(self._dtype)
