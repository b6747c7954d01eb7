"""Compile a model's blocks, and shard them by FSDP2: the last of what layout.py applies."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from spmdrl.model.parallel.expert_parallel import shard_experts


def apply_compile(hf_blocks: list[nn.Module]) -> None:
    """Compile every block in place; sequence packing makes shapes dynamic."""
    for block in hf_blocks:
        block.compile(dynamic=True)


def apply_fsdp(
    scorer: nn.Module,
    hf_blocks: list[nn.Module],
    *,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    dtype: torch.dtype,
    reshard_blocks: str = "auto",
    ahead: int = 0,
    is_on_host: bool = False,
) -> None:
    """Shard every block, and the rest as one unit, over the axes dp_replicate and fsdp.

    Applied at size 1 too, so that one path serves every layout. Parameters keep their dtype and
    are gathered in `dtype`; gradients are reduced in float32. FSDP2 averages gradients over
    the ranks of these axes: the loss is multiplied by their number to get sums.

    Args:
        scorer: the root module, on the meta device.
        hf_blocks: its transformer blocks, first to last.
        mesh: of the trainers, with axes dp_replicate, fsdp, tp (World.sharding).
        expert_mesh: for experts, with axes dp_replicate, efsdp and ep (World.experts); None: as all
            else.
        dtype: of forward and backward.
        reshard_blocks: `always`: a block's weights are freed after its forward pass and gathered
            again for the backward pass. `auto`: not the last block's, whose backward pass comes
            next. `never`. The rest stays gathered from forward to backward pass.
        ahead: blocks that are asked for before they are needed; 0 leaves it to FSDP2, which asks
            for the next one as soon as the host gets there. Neither changes a result.
        is_on_host: shards and their gradients are in pinned host memory, where the model is to be
            given storage; what is gathered is on the mesh's device (CUDA).
    """
    is_replicated = mesh["dp_replicate"].size() > 1
    data_mesh = mesh["dp_replicate", "fsdp"] if is_replicated else mesh["fsdp"]
    # Inputs are ids and masks: there is nothing to cast, and float32 outputs must stay so.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=True) if is_on_host else OffloadPolicy()
    is_sharded = mesh["fsdp"].size() > 1
    if expert_mesh is not None:
        shard_experts(scorer, mesh=expert_mesh, policy=policy, offload=offload)
    shard = partial(fully_shard, mesh=data_mesh, mp_policy=policy, offload_policy=offload)
    for block in hf_blocks:
        shard(block, reshard_after_forward=is_sharded)
    shard(scorer, reshard_after_forward=False)
    kept = {"auto": hf_blocks[-1:], "always": [], "never": hf_blocks}[reshard_blocks]
    for block in kept:  # with its experts
        block.set_reshard_after_forward(False)
    _ask_ahead(scorer, hf_blocks, ahead=ahead)


def _ask_ahead(scorer: nn.Module, hf_blocks: list[nn.Module], *, ahead: int) -> None:
    """Have every block ask for the weights of the `ahead` blocks that come next, in either pass,
    and for those of its own experts: the host may wait for their numbers of rows in between."""
    if not ahead:
        return
    units = [[m for m in block.modules() if isinstance(m, FSDPModule)] for block in hf_blocks]
    scorer.set_modules_to_forward_prefetch([m for unit in units[:ahead] for m in unit])
    for index, unit in enumerate(units):
        following = units[index + 1 : index + 1 + ahead]
        before = units[max(0, index - ahead) : index][::-1]
        for others, ask in (
            (following, unit[0].set_modules_to_forward_prefetch),
            (before, unit[0].set_modules_to_backward_prefetch),
        ):
            ask([*unit[1:], *(m for other in others for m in other)])


def reshard(scorer: nn.Module) -> None:
    """Free gathered parameters: after a forward pass that no backward pass follows."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
