"""Expert parallelism: each rank of an ep group has some experts, and tokens are sent to them.

transformers' own modules compute. A layer's experts are fused parameters [E, ...]. A rank holds
E / ep of them, which FSDP2 shards again over the other ranks of a replica, tp ranks included. In
the forward pass each copy of a token is sent to the rank that has its expert, and the result is
sent back, by two all-to-alls whose sizes are exchanged first. No token is dropped. Tokens are
sorted by expert, so that the same tokens always give the same sums.

The host must know the sizes. It waits for the device in each layer, unless routes are replayed:
then there is room for the rows that may come (expert_room.py), and rows without a token are of no
expert.

Shape letters: T tokens of this rank, K experts per token, E experts, R ranks of the ep group, S
rows that this rank's experts compute, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from spmdrl.columns import to_device
from spmdrl.model.blocks import experts_modules
from spmdrl.model.lora.expert_adapters import compute_experts, counts
from spmdrl.model.parallel.collectives import with_gradient
from spmdrl.model.tensor_parts import to_local
from spmdrl.model.transformers_internals import HAS_EMPTY_ROWS


def apply_ep(hf_model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts of a meta model over the ep axis, and have tokens sent to them.

    Args:
        hf_model: a transformers model on the meta device, changed in place. Its number of experts
            is a multiple of the ranks (see `divisibility.misfits`). A dense model, such as the
            value model of a mixture, is not changed.
        mesh: one-dimensional, the ep axis.
    """
    for experts in experts_modules(hf_model).values():
        for key, whole in list(experts.named_parameters(recurse=False)):
            # src_data_rank=None: a meta tensor has no values to send.
            sharded = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, key, nn.Parameter(sharded, requires_grad=whole.requires_grad))
        experts.forward = partial(_forward, experts, group=mesh.get_group())
        experts.room = None


def replicated(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return an axis of the trainers' mesh, with dp_replicate before it if that is above 1."""
    return mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]


def shard_experts(hf_model: nn.Module, *, mesh: DeviceMesh, shard: Callable[..., Any]) -> None:
    """Shard the experts of a rank over the ranks that hold the same ones, by FSDP2.

    There is one unit per layer. The blocks around them are sharded after this.

    Args:
        mesh: of the trainers, with axes dp_replicate, efsdp, ep (World.experts).
        shard: fully_shard with the options of the blocks.
    """
    shards = mesh["efsdp"].size()
    for experts in experts_modules(hf_model).values():
        local = experts.num_experts // mesh["ep"].size()
        shard(
            experts,
            mesh=replicated(mesh, "efsdp"),
            reshard_after_forward=shards > 1,
            shard_placement_fn=partial(_placement, count=local, shards=shards),
        )


def _placement(parameter: Tensor, *, count: int, shards: int) -> Shard:
    return Shard(expert_dim(parameter.shape, count=count, shards=shards))


def expert_dim(shape: Sequence[int], *, count: int, shards: int) -> int:
    """Return the dim over which `count` experts of a parameter [E, ...] are sharded.

    Whole experts to each rank, or parts of each expert where there are fewer than ranks.
    """
    return int(count < shards and len(shape) > 1 and shape[1] % shards == 0)


class _LocalExperts:
    """This rank's part of an experts module, with the attributes that transformers reads.

    Args:
        has_empty_rows: see HAS_EMPTY_ROWS.
    """

    def __init__(self, experts: nn.Module, ranks: int, *, has_empty_rows: bool):
        self._experts = experts
        setattr(self, HAS_EMPTY_ROWS, has_empty_rows)
        self.num_experts = experts.num_experts // ranks

    def __getattr__(self, name: str) -> Any:
        return to_local(getattr(self._experts, name))


def _forward(
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute what the module itself would compute with all experts.

    Args:
        hidden_states: [T, H]. top_k_index, top_k_weights: [T, K].
        group: of the ep axis.
    Returns: [T, H].
    """
    num_tokens, num_chosen = top_k_index.shape
    ranks = dist.get_world_size(group)
    local = experts.num_experts // ranks
    chosen = top_k_index.reshape(-1)  # [T * K]
    order = torch.sort(chosen, stable=True).indices
    sent = counts(chosen, experts.num_experts).long().view(ranks, local)
    received = torch.empty_like(sent)  # [R, E / R]: rows by the rank they come from, and expert
    dist.all_to_all_single(received, sent, group=group)
    room = experts.room
    if room is None:
        sizes = torch.stack([received.sum(1), sent.sum(1)])
        here, there = sizes.tolist()  # the only wait for the device
        token = order // num_chosen
    else:
        here = room.received
        there = room.sent
        is_row = _is_row(sent, there)
        # Empty rows have the values of others, and get no gradient.
        token = order[(is_row.cumsum(0) - 1).clamp(min=0)] // num_chosen
    # Received rows are ordered by rank, then by expert. Empty rows come last, of no expert.
    index = _filled(received, here)[:, None]  # [S, 1]
    rows = _travel(hidden_states[token], here=here, there=there, group=group)
    # The rank that has the token multiplies by the router's weights, so the experts get ones.
    ones = rows.new_ones(index.shape)
    own = _LocalExperts(experts, ranks, has_empty_rows=room is not None)
    rows = compute_experts(own, rows, index, ones)
    rows = _travel(rows, here=there, there=here, group=group)
    back = torch.sort(order).indices  # from the order of experts to that of tokens
    if room is not None:
        back = torch.sort(~is_row, stable=True).indices[back]
    weighted = rows[back].view(num_tokens, num_chosen, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _filled(sizes: Tensor, room: Sequence[int]) -> Tensor:
    """Return [sum(room)], for each row its place in the second dim of sizes [R, n] of rows; n for
    rows that are left over. `room` is the number of rows of each rank."""
    ranks, number = sizes.shape
    left = to_device(torch.tensor(room, dtype=sizes.dtype), sizes.device) - sizes.sum(1)
    sizes = torch.cat([sizes, left[:, None]], dim=1)
    places = torch.arange(number + 1, device=sizes.device).repeat(ranks)
    return places.repeat_interleave(sizes.flatten(), output_size=sum(room))


def _is_row(sizes: Tensor, room: Sequence[int]) -> Tensor:
    """Return [sum(room)] bool: which rows are filled by sizes [R, n]."""
    return _filled(sizes.sum(1, keepdim=True), room) == 0


def _travel(
    rows: Tensor, *, here: Sequence[int], there: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange rows; the backward pass sends gradients back."""
    return with_gradient(
        partial(_exchanged, here=here, there=there), partial(_exchanged, here=there, there=here)
    )(rows, group)


def _exchanged(
    rows: Tensor, group: dist.ProcessGroup, *, here: Sequence[int], there: Sequence[int]
) -> Tensor:
    """Return [sum(here), H]: `here` rows from each rank, for `there` rows to each."""
    received = rows.new_empty(sum(here), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), [*here], [*there], group=group)
    return received
