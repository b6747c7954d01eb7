"""Penalties for what came before a token, chunk by chunk.

An id that stands somewhere in a sequence counts for the tokens behind it up to the sequence's end:
+1 at the first of them that is scored, -1 behind the last. Counts of a chunk are the sum of what
comes before it and running sums over it.

Shape letters: N scored tokens, n of them in a chunk, V vocabulary, E changes of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.config import Penalties


@dataclass(frozen=True)
class Changes:
    """How counts of ids change from one scored token to the next."""

    at: Tensor  # [E] int64, the scored token from which on it holds, ascending
    ids: Tensor  # [E] int64
    by: Tensor  # [E] int32, 1 or -1
    ends: tuple[int, ...]  # [N + 1], how many changes hold before each scored token

    def counts(self, part: slice, *, first: int, width: int) -> Tensor:
        """Return how often ids of [first, first + width) came before tokens, [n, width] int32.

        Args:
            part: of consecutive scored tokens, at least one.
        """
        begin, end = self.ends[part.start + 1], self.ends[part.stop]
        ids = self.ids[:end] - first
        ids = torch.where((ids >= 0) & (ids < width), ids, width)  # a column that nobody reads
        changes = torch.zeros(
            part.stop - part.start, width + 1, dtype=torch.int32, device=ids.device
        )
        changes[0].index_add_(0, ids[:begin], self.by[:begin])
        places = (self.at[begin:end] - part.start, ids[begin:end])
        changes.index_put_(places, self.by[begin:end], accumulate=True)
        return changes.cumsum(dim=0, dtype=torch.int32)[:, :width]


@dataclass(frozen=True)
class History:
    """What came before each of N scored tokens."""

    all: Changes
    """Prompt and response."""
    response: Changes
    """The response alone."""


def make_history(
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    drawn: Tensor,
    scored: Tensor,
    device: torch.device | str,
) -> History:
    """Return what came before the scored tokens of a packed row.

    Args:
        tokens: [T] int64 on the CPU.
        lengths: tokens per sequence.
        drawn: [T] bool, tokens of responses.
        scored: [N] int64, positions, ascending.
        device: of the result.
    """
    bounds = torch.tensor(lengths).cumsum(0)
    after = torch.searchsorted(scored, torch.arange(len(tokens)), right=True)
    end = torch.searchsorted(scored, bounds).repeat_interleave(torch.tensor(lengths))

    def changes(chosen: Tensor) -> Changes:
        chosen = (chosen & (after < end)).nonzero()[:, 0]
        at = torch.cat([after[chosen], end[chosen]])
        by = torch.ones(len(chosen), dtype=torch.int32)
        order = at.argsort(stable=True)
        at, ids = at[order], tokens[chosen].repeat(2)[order]
        ends = torch.searchsorted(at, torch.arange(-1, len(scored)), right=True)
        return Changes(
            at.to(device),
            ids.to(device),
            torch.cat([by, -by])[order].to(device),
            tuple(ends.tolist()),
        )

    return History(changes(torch.ones_like(drawn)), changes(drawn))


def penalise(
    logits: Tensor, penalties: Penalties, *, came: Tensor | None, counts: Tensor | None, first: int
) -> tuple[Tensor, Tensor | None]:
    """Apply penalties to logits.

    Args:
        logits: [n, width] float32, before temperature, of ids from `first` on.
        came: [n, width] bool, ids that came before; None where `repetition` is 1.
        counts: [n, width], how often they came in the response; None where it does not matter.
    Returns: the penalised logits, and by how much they change per change of the plain ones (None:
        by as much).
    """
    width, scale = logits.shape[1], None
    if penalties.bias:
        ids = torch.tensor([i for i, _ in penalties.bias], device=logits.device) - first
        added = torch.tensor([b for _, b in penalties.bias], device=logits.device)
        is_own = (ids >= 0) & (ids < width)
        whole = logits.new_zeros(width).index_add_(0, ids.clamp(0, width - 1), added * is_own)
        logits = logits + whole
    if came is not None:
        factor = torch.where(logits > 0, 1.0 / penalties.repetition, penalties.repetition)
        scale = factor.masked_fill_(~came, 1.0)
        logits = logits * scale
    if counts is not None:
        logits = logits - penalties.frequency * counts
        logits = logits - penalties.presence * (counts > 0)
    return logits, scale
