"""Where adapters of experts lie in vLLM's stacks, and what its CPU build computes with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spmdrl.engine.vllm.expert_adapters import LowRank, load_experts

EXPERTS, RANK, HIDDEN, INNER, SLOT_RANK = 4, 3, 5, 6, 8


def _stacks(*, rank: int, size: int, is_ep: bool, is_3d: bool = False) -> Any:
    """vLLM's own layer as one rank of an engine has it, in float64, without the frozen weights."""
    from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA

    layer = object.__new__(FusedMoE3DWithLoRA if is_3d else FusedMoEWithLoRA)
    nn.Module.__init__(layer)
    layer.tp_size = 1 if is_ep else size
    layer.tp_rank = 0 if is_ep else rank
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        is_act_and_mul=True,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS // size if is_ep else EXPERTS,
        intermediate_size_per_partition=INNER if is_ep else INNER // size,
        moe_parallel_config=SimpleNamespace(use_ep=is_ep, ep_rank=rank if is_ep else 0),
    )
    layer.fully_sharded = False
    layer.enable_moe_shared_loras = False
    layer.device = "cpu"
    layer._w13_slices = 1 if is_3d else 2
    layer._base_model = "Qwen3_5MoeForConditionalGeneration"
    settings = SimpleNamespace(max_lora_rank=SLOT_RANK, lora_dtype=torch.float64)
    layer._create_lora_a_weights(1, settings)
    layer._create_lora_b_weights(1, settings)
    for stacked in (*layer.w13_lora_a_stacked, *layer.w2_lora_b_stacked):
        stacked.fill_(7.0)  # what a write leaves out is seen
    return layer


def _matrices() -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    first = (draw(EXPERTS, RANK, HIDDEN), draw(EXPERTS, 2 * INNER, RANK))
    second = (draw(EXPERTS, RANK, INNER), draw(EXPERTS, HIDDEN, RANK))
    return [first, second], first[1] @ first[0], second[1] @ second[0]


@pytest.mark.parametrize("is_3d", [False, True])
@pytest.mark.parametrize("size, is_ep", [(1, False), (2, False), (2, True), (4, True)])
def test_stacks_hold_each_ranks_part_of_what_merging_would_add(size, is_ep, is_3d):
    pairs, added_first, added_second = _matrices()
    for rank in range(size):
        layer = _stacks(rank=rank, size=size, is_ep=is_ep, is_3d=is_3d)
        load_experts(layer, 0, pairs)
        experts = slice(None)
        inner = slice(None)
        if is_ep:
            experts = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        else:
            inner = slice(rank * INNER // size, (rank + 1) * INNER // size)
        first = zip(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked)
        gate, up = torch.cat([b[0] @ a[0] for a, b in first], dim=1).chunk(2, dim=1)
        torch.testing.assert_close(gate, added_first[experts, :INNER][:, inner])
        torch.testing.assert_close(up, added_first[experts, INNER:][:, inner])
        down = layer.w2_lora_b_stacked[0][0] @ layer.w2_lora_a_stacked[0][0]
        torch.testing.assert_close(down, added_second[experts][:, :, inner])


def test_rows_of_the_policy_alone_get_the_low_rank_terms():
    pairs, added_first, added_second = _matrices()
    layer = _stacks(rank=0, size=1, is_ep=False)
    load_experts(layer, 0, pairs)
    slots = torch.tensor([0, -1, 0])
    context = SimpleNamespace(
        w13_lora_a_stacked=layer.w13_lora_a_stacked,
        w13_lora_b_stacked=layer.w13_lora_b_stacked,
        w2_lora_a_stacked=layer.w2_lora_a_stacked,
        w2_lora_b_stacked=layer.w2_lora_b_stacked,
        local_token_lora_mapping=None,
        punica_wrapper=SimpleNamespace(token_lora_indices=slots),
    )
    tokens = torch.tensor([2, 0, 1, 2])  # of four rows: the last three are of expert 1
    low_rank = LowRank(context, tokens)
    x = torch.linspace(-1, 1, 3 * HIDDEN, dtype=torch.float64).view(3, HIDDEN)
    out = torch.ones(3, 2 * INNER, dtype=torch.float64)
    low_rank.add_first(out, x, expert=1, begin=1)
    is_on = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(out, 1 + is_on * (x @ added_first[1].T))
    inner = torch.linspace(-1, 1, 3 * INNER, dtype=torch.float64).view(3, INNER)
    out = torch.ones(3, HIDDEN, dtype=torch.float64)
    low_rank.add_second(out, inner, expert=1, begin=1)
    torch.testing.assert_close(out, 1 + is_on * (inner @ added_second[1].T))
