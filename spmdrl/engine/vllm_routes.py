"""Which experts vLLM's routers choose, token by token, for the trainer to replay.

vLLM 0.32 can return them itself, by a model runner that its CPU build does not have. There, its
hooks on the routers write into a buffer of ours, keyed by the KV cache's slots: a token's route is
where its keys and values are, whichever request computed them. Serves vLLM 0.32 and 0.33.

Shape letters: n tokens, L layers with experts, K experts per token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.engine.protocol import route_dtype


class Routes(Protocol):
    """The routes of requests that are under way, or have just finished."""

    def added(self, key: str, request_id: str) -> None:
        """Take up a request, by our name and by vLLM's."""

    def finished(self, key: str, output: Any) -> Tensor:
        """Return [n, L, K] of all tokens but the last, of a request that finished in this step."""

    def unfinished(self, state: Any) -> Tensor | None:
        """Return [n, L, K] of the tokens whose routes are known; None for none."""

    def keep(self, state: Any) -> None:
        """Hold on to the routes of a request whose KV cache may be dropped."""


def make_routes(llm: Any, *, on_cpu: bool) -> Routes:
    """Return the recorder of an engine's routes.

    Args:
        llm: vLLM's engine; off the CPU built with `route_arguments`.
    Raises: ValueError when this vLLM or this model cannot record them.
    """
    try:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )
    except ImportError as error:
        raise ValueError(
            "model.moe.replay: this vLLM cannot say which experts it chooses "
            f"({error}); take 0.32, or set it to false"
        ) from error
    runner = llm.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()
    layers = sorted(m.layer_id for m in model.modules() if isinstance(m, MoERunner))
    if not on_cpu:
        return _Returned(layers, num_experts=_num_experts(runner))
    found = _BySlot(runner, layers)
    bind_routed_experts_capturer(model, found)
    return found


def route_arguments(*, on_cpu: bool) -> dict[str, Any]:
    """Return the engine arguments that recording needs."""
    # A finished request is read before the next step is scheduled.
    return {"async_scheduling": False} if on_cpu else {"enable_return_routed_experts": True}


def _num_experts(runner: Any) -> int:
    return runner.vllm_config.model_config.get_num_experts()


class _BySlot:
    """Routes in a buffer [slots, L, K] beside the KV cache.

    Raises: ValueError for a model without layers that keep all keys of a sequence.
    """

    def __init__(self, runner: Any, layers: list[int]):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        config = runner.kv_cache_config
        groups = [
            (at, group)
            for at, group in enumerate(config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, FullAttentionSpec)
        ]
        if not groups:
            raise ValueError(
                "model.moe.replay: vLLM drops keys of this model that are out of its "
                "attention's window, and the routes of these tokens with them; set "
                "it to false, or engine.kind to transformers"
            )
        at, group = groups[0]
        self._group, self._attention = at, group.layer_names[0]
        self._runner = runner
        self._place = {layer: place for place, layer in enumerate(layers)}
        chosen = runner.vllm_config.model_config.get_num_experts_per_tok()
        slots = config.num_blocks * group.kv_cache_spec.block_size
        self._chosen = torch.full(
            (slots, len(layers), chosen), -1, dtype=route_dtype(_num_experts(runner))
        )
        self._ids: dict[str, str] = {}  # by key
        self._kept: dict[str, Tensor] = {}

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Take what a layer's router chose for the step's tokens, [n, K]."""
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping.get(self._attention)
        if slots is None:
            return  # a warm-up: nobody's tokens
        slots = slots[: len(topk_ids)]
        real = slots >= 0
        self._chosen[slots[real], self._place[layer_id]] = topk_ids[real].to(self._chosen.dtype)

    def added(self, key: str, request_id: str) -> None:
        self._ids[key] = request_id

    def finished(self, key: str, output: Any) -> Tensor:
        count = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        routes = self._so_far(key, count)
        del self._ids[key]
        self._kept.pop(key, None)
        return _checked(key, routes, count=count)

    def unfinished(self, state: Any) -> Tensor | None:
        drawn = len(state.detokenizer.output_token_ids)
        if not drawn:  # prompts are computed whole here: it has not begun
            return self._kept.get(state.external_req_id)
        return self._so_far(state.external_req_id, state.prompt_len + drawn - 1)

    def keep(self, state: Any) -> None:
        routes = self.unfinished(state)
        if routes is not None:
            self._kept[state.external_req_id] = routes

    def _so_far(self, key: str, count: int) -> Tensor | None:
        """Return the routes that were kept, and behind them what the cache has."""
        kept, batch = self._kept.get(key), self._runner.input_batch
        row = batch.req_id_to_index.get(self._ids[key])
        if row is None or (kept is not None and len(kept) >= count):
            return kept
        table = batch.block_table[self._group]
        at = torch.arange(0 if kept is None else len(kept), count)
        blocks = torch.from_numpy(table.block_table.np[row])[at // table.block_size].long()
        found = self._chosen[blocks * table.block_size + at % table.block_size]
        return found if kept is None else torch.cat([kept, found])


def _checked(key: str, routes: Tensor | None, *, count: int) -> Tensor:
    """Return routes of `count` tokens. Raises: RuntimeError when these are not."""
    if routes is None or len(routes) != count or bool((routes < 0).any()):
        known = 0 if routes is None else int((routes >= 0).flatten(1).all(dim=1).sum())
        raise RuntimeError(
            f"request {key}: vLLM's routers were seen to choose experts for "
            f"{known} of its {count} tokens; set model.moe.replay to false"
        )
    return routes


class _Returned:
    """Routes that vLLM itself returns, of all layers, for those with experts."""

    def __init__(self, layers: list[int], *, num_experts: int):
        self._layers, self._dtype = layers, route_dtype(num_experts)

    def added(self, key: str, request_id: str) -> None:
        """Do nothing: vLLM hands them over with the request."""

    def finished(self, key: str, output: Any) -> Tensor:
        sample = output.outputs[0]
        routes = None if sample.routed_experts is None else self._ours(sample.routed_experts)
        return _checked(key, routes, count=len(output.prompt_token_ids) + len(sample.token_ids) - 1)

    def unfinished(self, state: Any) -> Tensor | None:
        chunks = [torch.from_numpy(chunk.astype("int32")) for chunk in state.routed_experts_chunks]
        return self._ours(torch.cat(chunks).numpy()) if chunks else None

    def keep(self, state: Any) -> None:
        """Do nothing: vLLM keeps what it has handed over."""

    def _ours(self, routes: Any) -> Tensor:
        return torch.from_numpy(routes[:, self._layers].astype("int32")).to(self._dtype)
