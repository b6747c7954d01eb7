"""What a proof computes on: sequences of many lengths, and one batch of them for an update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.types import Batch, Microbatch, Scalars

ROWS = (5, 70, 33, 2, 9, 40)
"""Tokens of the sequences that are scored: some beyond every window and chunk of a small model, and
several to a packed row."""
PACKED = 128  # tokens of a packed row
_TRAINED = (9, 5, 30, 12, 7, 2, 24, 11)
"""Tokens of the sequences that are trained on; the first third of each is its prompt."""
_FIRST = 3  # id behind those of padding, beginning and end


def sequences(vocabulary: int) -> list[list[int]]:
    """Return the sequences that are scored."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(_FIRST, vocabulary, (n,), generator=generator).tolist() for n in ROWS]


def batch_of(world: Any, *, vocabulary: int) -> tuple[Batch, Tensor]:
    """Return this rank's part of one batch, and each sequence's advantage [S] float64.

    The batch is the same whatever the layout; a dp rank takes every so manieth sequence.
    """
    count, lengths = len(_TRAINED), torch.tensor(_TRAINED)
    own = list(range(world.dp_index(world.rank), count, world.dp_size))
    half = -(-len(own) // 2)
    ids = torch.arange(count)
    scalars = Scalars(
        lengths=lengths,
        response_lengths=lengths - (lengths + 2) // 3,
        group_ids=ids // 2,
        sample_ids=ids % 2,
        rewards=torch.zeros(count).double(),
        is_truncated=ids == 6,
        is_valid=ids != 4,
        min_versions=torch.zeros_like(ids),
    )
    parts = tuple(_microbatch(part, vocabulary) for part in (own[:half], own[half:]))
    advantages = torch.linspace(-1.0, 1.5, count).double()
    return Batch(scalars=scalars, updates=(parts,), update_ids=torch.zeros_like(ids)), advantages


def _microbatch(ids: list[int], vocabulary: int) -> Microbatch:
    lengths = torch.tensor([_TRAINED[i] for i in ids])
    mask = torch.cat([torch.arange(n) >= (n + 2) // 3 for n in lengths])
    drawn = [-3 - torch.rand(_TRAINED[i], generator=_generator(i)) for i in ids]
    return Microbatch(
        tokens=torch.cat([_sequence(i, vocabulary) for i in ids]),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, torch.cat(drawn), 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.tensor(ids),
    )


def _sequence(index: int, vocabulary: int) -> Tensor:
    return torch.randint(_FIRST, vocabulary, (_TRAINED[index],), generator=_generator(index))


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + index)
