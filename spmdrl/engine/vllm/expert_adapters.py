"""Adapters of experts in vLLM: its stacks of them, and on the CPU the computation.

Trainers have for each layer A [E, r, in] and B [E, out, r] of `gate_up_proj` and of `down_proj`.
vLLM's FusedMoEWithLoRA (lora/layers/fused_moe.py, 0.32) has w1 (gate), w3 (up) and w2 (down), each
[slots, experts of this rank, rank, in] and [slots, experts of this rank, out, rank]. So A of
`gate_up_proj` stands twice there, and B is halved. Its FusedMoE3DWithLoRA has w1 and w3 in one.

Serves vLLM 0.32. Each line has the name here, vLLM's own, and when it can be removed.

is_of_experts, stacks, load_experts, name_experts   lora.layers.FusedMoEWithLoRA
                                                    with adapter.AdapterSlot
choose_cpu_experts  select_unquantized_moe_backend, LoRAExpertsMixin, CPUUnquantizedExperts
                                                    once its CPU experts take adapters
LowRank             MoELoRAContext                  with choose_cpu_experts
"""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

ADAPTED_MIXTURES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5_moe",
        "flex_olmo",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "hunyuan_v1_moe",
        "lfm2_moe",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe",
    }
)
"""Families (model_type) of which vLLM computed with each kind of adapter what trainers did."""

_STACKS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")


def is_of_experts(module: nn.Module) -> bool:
    """Return whether a layer with adapters of vLLM's is one of experts."""
    return hasattr(module, _STACKS[0])


def stacks(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes with a layer's stacks of matrices."""
    return _STACKS if is_of_experts(module) else ("lora_a_stacked", "lora_b_stacked")


def load_experts(module: Any, slot: int, pairs: list[tuple[Tensor | None, Tensor | None]]) -> None:
    """Copy a layer's whole matrices into a slot, as far as this rank has them.

    Args:
        module: vLLM's FusedMoEWithLoRA.
        pairs: A [E, r, in] and B [E, out, r] of gate_up_proj and of down_proj; None for zeros.
    Raises: ValueError for experts that vLLM stacks in another form.
    """
    if not module.moe_config.is_act_and_mul:
        raise ValueError("experts without a gate are not mapped")
    per_rank = module.local_num_experts
    if module.global_num_experts % per_rank:
        raise ValueError(f"{module.global_num_experts} experts are not {per_rank} on each rank")
    begin = module.ep_rank * per_rank if module.use_ep else 0
    (a13, b13), (a2, b2) = (
        [None if t is None else t[begin : begin + per_rank] for t in pair] for pair in pairs
    )
    first = (slot, slice(None))
    if a13 is not None and b13 is not None:
        first_b = b13.chunk(len(module.w13_lora_a_stacked), dim=1)
        for stacked_a, stacked_b, b in zip(
            module.w13_lora_a_stacked, module.w13_lora_b_stacked, first_b
        ):
            _fill(stacked_a[first], a13)
            _fill(stacked_b[first], module._slice_w13_b(b))
    if a2 is not None and b2 is not None:
        _fill(module.w2_lora_a_stacked[0][first], module._slice_w2_a(a2))
        _fill(module.w2_lora_b_stacked[0][first], b2)


def _fill(stacked: Tensor, matrix: Tensor) -> None:
    """Write [E, rows, columns] into the corner of a stack, whose rank may be larger."""
    stacked.zero_()
    stacked[:, : matrix.shape[1], : matrix.shape[2]].copy_(matrix)


def name_experts(module: Any, *, is_wrapped: bool) -> None:
    """Have vLLM's loaders look for experts inside a layer with adapters, or where they were."""
    if is_of_experts(module):
        prefix = "base_layer." if is_wrapped else ""
        module.base_layer.routed_experts.lora_base_layer_prefix = prefix


# --------------------------------------------------------------------------- CPU


def choose_cpu_experts() -> None:
    """Have vLLM's CPU build compute experts as without LoRA: with it, vLLM chooses Triton's kernels
    on every device, also where no expert has an adapter."""
    try:
        from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
        from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    except ImportError:
        return
    choose = method.select_unquantized_moe_backend
    if hasattr(choose, "__wrapped__"):
        return

    class WithAdapters(LoRAExpertsMixin, CPUUnquantizedExperts):
        """vLLM gives adapters only to experts with this mixin."""

    @wraps(choose)
    def chosen(moe_config: Any, *args: Any, **options: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        backend, experts = choose(plain, *args, **options)
        with_adapters = moe_config.is_lora_enabled and experts is CPUUnquantizedExperts
        return backend, WithAdapters if with_adapters else experts

    method.select_unquantized_moe_backend = chosen


class LowRank:
    """The low-rank terms of one pass through a layer's experts, for rows sorted by expert.

    Args:
        context: vLLM's MoELoRAContext: its only slot is the first.
        tokens: [S], the token of each row.
    """

    def __init__(self, context: Any, tokens: Tensor):
        self._first = (*zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked),)
        self._second = (*zip(context.w2_lora_a_stacked, context.w2_lora_b_stacked),)
        slots = context.local_token_lora_mapping
        if slots is None:
            slots = context.punica_wrapper.token_lora_indices
        self._is_on = slots[tokens] >= 0

    def add_first(self, out: Tensor, x: Tensor, *, expert: int, begin: int) -> None:
        """Add to gate and up, [rows, 2 I], of rows from `begin` on what x [rows, H] adds."""
        self._add(self._first, out, x, expert=expert, begin=begin)

    def add_second(self, out: Tensor, x: Tensor, *, expert: int, begin: int) -> None:
        """Add to the output, [rows, H], what x [rows, I] adds."""
        self._add(self._second, out, x, expert=expert, begin=begin)

    def _add(self, pairs: Any, out: Tensor, x: Tensor, *, expert: int, begin: int) -> None:
        terms = [(x @ a[0, expert].t()) @ b[0, expert].t() for a, b in pairs]
        is_on = self._is_on[begin : begin + len(x), None]
        out += torch.cat(terms, dim=1).masked_fill(~is_on, 0.0)
