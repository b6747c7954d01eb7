"""Room for the rows that the ranks of an ep group send each other, found before a forward pass.

The sizes of an exchange must be known on the host. What a router chooses is known on the device
only, so that the host would wait for the device in each layer. Routes that are replayed are known
beforehand, but for tokens without a record, such as the last one of a sequence, for which routers
choose. For each of these there is room at every rank that might get it.

Shape letters: M micro-batches, t tokens of this rank, L layers with experts, K experts per token, R
ranks of the ep group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.model.lora.expert_adapters import counts
from spmdrl.model.parallel.collectives import gathered

_FEW = 64
"""So many tokens without a record may have room at every rank, however short the row is."""
_MOST_SHARE = 4
"""Rows without use are at most one in so many."""


@dataclass(frozen=True)
class Room:
    """The most rows of a layer that this rank sends to each rank, and gets from each: [R]."""

    sent: Sequence[int]
    received: Sequence[int]


def plan_room(
    routes: Sequence[Tensor | None],
    num_tokens: Sequence[int],
    *,
    num_layers: int,
    num_experts: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[list[Room] | None]:
    """Return the room of each micro-batch, [M] of [L]; None where too few tokens have routes.

    The ranks of the group call it together, with as many micro-batches. The host waits once.

    Args:
        routes: per micro-batch, [t, L, K], -1 for tokens without a record; None for no records.
        num_tokens: t, per micro-batch.
        group: of the ep axis.
        device: of the group's tensors.
    """
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    local = num_experts // size
    own = []
    for one, count in zip(routes, num_tokens, strict=True):
        if one is None:
            one = torch.full((count, num_layers, 0), -1, device=device)
        own.append(_described(one, local=local, size=size))
    described = gathered(torch.stack(own), group).transpose(0, 1).tolist()  # [M, R, ...]
    # Ranks without records do not know K, and micro-batches may have none on any rank.
    num_chosen = max(own[1] for ranks in described for own in ranks)
    if num_chosen == 0:
        return [None] * len(described)
    copies = min(num_chosen, local)  # of a token that may go to one rank
    return [_room(r, rank=rank, num_layers=num_layers, copies=copies) for r in described]


def _described(routes: Tensor, *, local: int, size: int) -> Tensor:
    """Return, as one int64 tensor, t and K; per layer, tokens without a record; and per layer and
    rank, the recorded rows that it gets."""
    count, num_layers, num_chosen = routes.shape
    number = num_layers * size
    layer = torch.arange(num_layers, device=routes.device)[:, None]
    place = layer * size + routes.long() // local
    known = counts(torch.where(routes < 0, number, place), number).long()
    unknown = count - (routes[:, :, :1] >= 0).sum(dim=(0, 2))
    return torch.cat([known.new_tensor([count, num_chosen]), unknown, known])


def _room(
    ranks: Sequence[Sequence[int]], *, rank: int, num_layers: int, copies: int
) -> list[Room] | None:
    """Return the room of each layer, from what each rank described.

    Args:
        copies: of a token that may go to one rank.
    """
    size = len(ranks)
    for count, _, *of_layers in ranks:
        if max(of_layers[:num_layers]) > max(_FEW, count // (size * _MOST_SHARE)):
            return None
    room = []
    for layer in range(num_layers):
        most = []  # [R, R], from rank to rank
        for _, _, *of_layers in ranks:
            known = of_layers[num_layers + layer * size :][:size]
            most.append([rows + of_layers[layer] * copies for rows in known])
        room.append(Room(most[rank], [sent[rank] for sent in most]))
    return room
