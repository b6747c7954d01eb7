"""Patches of vLLM's CPU build, most of which let its weights be written in place.

Serves vLLM 0.24 to 0.33; what says so, 0.32 and 0.33 only. Per line: the name here, what it
patches, and when it can go.

inspect_models_here        model_executor.models.registry._run_in_subprocess    once asked for
keep_linear_weights_live   model_executor.layers.utils.dispatch_cpu_unquantized_gemm
                                                            once CPU linears may stay unpacked
keep_convolutions_live     _custom_ops.causal_conv1d_fwd_cpu, causal_conv1d_update_cpu (0.32, 0.33)
                                                            with the first
rotate_every_head          _custom_ops.rotary_embedding    once its kernel knows such heads
route_in_one_group         fused_moe.router.cpu_router.CPURouter (0.32, 0.33)
                                                            once it knows such routers
keep_expert_weights_live   fused_moe.experts.cpu_moe.CPUUnquantizedExperts (0.32, 0.33)
                                                            once CPU experts may stay unpacked
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def inspect_models_here() -> None:
    """Look at a model's class in this process, which loads it in any case.

    vLLM asks a fresh process, lest a GPU be touched in this one: 10 s of a core for each class that
    its cache does not know, on every rank.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def keep_linear_weights_live() -> None:
    """Stop vLLM's CPU build from packing linear weights into copies and freeing the originals.

    With packed copies an update in place finds empty tensors. Costs under 3% of throughput.
    """
    from vllm.model_executor.layers import utils

    def unpacked(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def keep_convolutions_live() -> None:
    """Have convolutions over tokens take their weights as they were loaded.

    On CPUs with AVX512-bf16 vLLM packs these weights where it packs those of linear layers, which
    `keep_linear_weights_live` prevents, and tells the kernels that they are packed.
    """
    from vllm import _custom_ops

    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        kernel = getattr(_custom_ops, name, None)
        if kernel is not None and not hasattr(kernel, "__wrapped__"):
            setattr(_custom_ops, name, _of_unpacked(kernel))


def _of_unpacked(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(kernel)
    def call(*, weight: Tensor, is_weight_packed: bool, **others: Any) -> Tensor:
        """weight: [channels, 1, width], or without its second dim."""
        return kernel(weight=weight.flatten(1), is_weight_packed=False, **others)

    return call


def rotate_every_head() -> None:
    """Have the rotary kernel rotate all heads where they are a dim of their own (LFM2), as well as
    where they are not: it takes them for more tokens."""
    from vllm import _custom_ops

    kernel = _custom_ops.rotary_embedding
    if hasattr(kernel, "__wrapped__"):
        return

    @wraps(kernel)
    def rotate(
        positions: Tensor, query: Tensor, key: Tensor | None, *others: Any, **options: Any
    ) -> None:
        both = [heads for heads in (query, key) if heads is not None]
        rows = [heads.reshape(*positions.shape, -1) for heads in both]
        kernel(positions, rows[0], rows[1] if len(rows) > 1 else None, *others, **options)
        for heads, own in zip(both, rows, strict=True):
            if own.data_ptr() != heads.data_ptr():  # of a part of each head, which was copied
                heads.copy_(own.view_as(heads))

    _custom_ops.rotary_embedding = rotate


def route_in_one_group() -> None:
    """Have routers without groups of experts know sigmoids and biases, as those with groups do.

    Without groups vLLM's CPU build takes the softmax alone: it refuses sigmoids (MiniMax-M2), and
    leaves out the bias that experts are chosen by (Ernie 4.5) without a word.
    """
    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:
        return
    build = CPURouter.__init__
    if hasattr(build, "__wrapped__"):
        return

    @wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        is_plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        knows = self.scoring_func in ("softmax", "sigmoid") and not self.custom_routing_function
        if knows and not is_plain and not self.use_grouped_topk:
            self.use_grouped_topk = True
            self.num_expert_group = 1
            self.topk_group = 1

    CPURouter.__init__ = built


def keep_expert_weights_live() -> None:
    """Have vLLM's CPU build compute experts from their weights as they were loaded.

    It packs them into storage of the same shape, and its reload (0.32.0) leaves the new ones
    unpacked, so that neither a write in place nor a reload would be right. Without that module
    the proof of layout refuses.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return

    def keep(self: Any, layer: nn.Module) -> None:
        self._use_zentorch = False

    CPUUnquantizedExperts.process_weights_after_loading = keep
    CPUUnquantizedExperts.apply = _apply_experts


def _apply_experts(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    **others: Any,
) -> None:
    """Write the experts' weighted sum into output, [T, H], as `CPUUnquantizedExperts.apply` does.

    w1: [E, 2 I, H], gate before up. w2: [E, H, I]. topk_weights, topk_ids: [T, K]. others: what
    vLLM hands over besides, for kernels that need it.
    """
    num_tokens, num_chosen = topk_ids.shape
    ids, order = torch.sort(topk_ids.flatten().long(), stable=True)
    rows = hidden_states[order // num_chosen]
    parts = []
    for index, part in enumerate(rows.split(torch.bincount(ids, minlength=len(w1)).tolist())):
        bias1, bias2 = (b if b is None else b[index] for b in (self.w1_bias, self.w2_bias))
        gate_up = nn.functional.linear(part, w1[index], bias1)
        inner = gate_up.new_empty(len(part), w2.shape[2])
        if len(part):
            _activate(activation, inner, gate_up)
        parts.append(nn.functional.linear(inner, w2[index], bias2))
    computed = torch.empty_like(rows).index_copy_(0, order, torch.cat(parts))
    computed = computed.view(num_tokens, num_chosen, -1)
    if not apply_router_weight_on_input:  # else the rows came weighted
        computed = computed * topk_weights[..., None]
    output.copy_(computed.sum(dim=1))


def _activate(activation: Any, output: Tensor, rows: Tensor) -> None:
    """Write into output, [S, I], what an expert makes of rows, [S, 2 I], between its projections.

    GPT-OSS's operation is in the packed kernel of the CPU build alone: its numbers are those there.
    """
    from vllm.model_executor.layers.activation import SwigluOAIAndMul
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    if activation.value == "swigluoai":
        numbers = SimpleNamespace(alpha=1.702, limit=7.0)
        output.copy_(SwigluOAIAndMul.forward_native(numbers, rows))  # type: ignore[arg-type]
    else:
        apply_moe_activation(activation, output, rows)
