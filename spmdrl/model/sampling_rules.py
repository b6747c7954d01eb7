"""How scored tokens were sampled, other than by temperature: penalties, biases, sampling masks.

Penalties depend on the ids before a token. An id in a sequence counts for all tokens after it, up
to the end of the sequence: +1 at the first of them that is scored, -1 after the last. The counts of
a chunk are the sum of all changes before it plus running sums over it. Sampling masks, too, are
made chunk by chunk.

Shape letters: N scored tokens, n of them in a chunk, V vocabulary (this rank's part of it where
logits are), E changes of counts or ids in lists, B sets of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.config import Penalties
from spmdrl.sampling_masks import SamplingMasks


@dataclass(frozen=True)
class Changes:
    """Changes of the counts of ids, from one scored token to the next."""

    at: Tensor  # [E] int64, the first scored token for which a change holds, ascending
    ids: Tensor  # [E] int64
    by: Tensor  # [E] int32, 1 or -1
    ends: tuple[int, ...]  # [N + 1], number of changes before each scored token

    def counts(self, part: slice, *, first: int, width: int) -> Tensor:
        """Return how often ids of [first, first + width) are before each token, [n, width] int32.

        Args:
            part: of consecutive scored tokens, at least one.
        """
        # Changes up to the first token go into its row, and the running sum carries them on.
        begin = self.ends[part.start + 1]
        end = self.ends[part.stop]
        ids = self.ids[:end] - first
        ids = torch.where((ids >= 0) & (ids < width), ids, width)  # a column that is dropped
        changes = torch.zeros(
            part.stop - part.start, width + 1, dtype=torch.int32, device=ids.device
        )
        changes[0].index_add_(0, ids[:begin], self.by[:begin])
        places = (self.at[begin:end] - part.start, ids[begin:end])
        changes.index_put_(places, self.by[begin:end], accumulate=True)
        return changes.cumsum(dim=0, dtype=torch.int32)[:, :width]


@dataclass(frozen=True)
class History:
    """The ids before each of N scored tokens."""

    all: Changes
    """In prompt and response."""
    response: Changes
    """In the response."""


def _history(
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    drawn: Tensor,
    scored: Tensor,
    device: torch.device | str,
) -> History:
    """Return the ids before the scored tokens of a packed row.

    Args:
        tokens: [T] int64 on the CPU.
        lengths: tokens per sequence.
        drawn: [T] bool, tokens of responses.
        scored: [N] int64, positions, ascending.
        device: of the result.
    """
    bounds = torch.tensor(lengths).cumsum(0)
    # right=True: a token does not count for itself.
    after = torch.searchsorted(scored, torch.arange(len(tokens)), right=True)
    end = torch.searchsorted(scored, bounds).repeat_interleave(torch.tensor(lengths))

    def changes(chosen: Tensor) -> Changes:
        # Ids after the last scored token of their sequence count for no token.
        chosen = (chosen & (after < end)).nonzero()[:, 0]
        at = torch.cat([after[chosen], end[chosen]])
        by = torch.ones(len(chosen), dtype=torch.int32)
        order = at.argsort(stable=True)
        at = at[order]
        ids = tokens[chosen].repeat(2)[order]
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
        came: [n, width] bool, ids that are before the token; None if `repetition` is 1.
        counts: [n, width], how often they are in the response; None if no penalty counts.
    Returns: the penalised logits, and their derivative by the plain logits (None: 1).
    """
    width = logits.shape[1]
    scale = None
    if penalties.bias:
        ids = torch.tensor([i for i, _ in penalties.bias], device=logits.device) - first
        added = torch.tensor([b for _, b in penalties.bias], device=logits.device)
        is_own = (ids >= 0) & (ids < width)
        whole = logits.new_zeros(width).index_add_(0, ids.clamp(0, width - 1), added * is_own)
        logits = logits + whole
    if came is not None:
        # In float32, as in vLLM: 1 / 1.1 has other bits when float64 is rounded.
        repetition = logits.new_tensor(penalties.repetition)
        factor = torch.where(logits > 0, 1.0 / repetition, repetition)
        scale = factor.masked_fill_(~came, 1.0)
        logits = logits * scale
    if counts is not None:
        logits = logits - penalties.frequency * counts
        logits = logits - penalties.presence * (counts > 0)
    return logits, scale


@dataclass(frozen=True)
class SamplingMask:
    """The ids among which each of N scored tokens was sampled, on the device of the logits."""

    vocab: int  # V
    is_cut: Tensor  # [N] bool, not sampled among all ids
    rows: Tensor  # [E] int64, the token that an id belongs to, ascending
    ids: Tensor  # [E] int64
    row_ends: tuple[int, ...]  # [N + 1], where each token's ids end
    owners: Tensor  # [B] int64, the token that a set of bits belongs to, ascending
    bits: Tensor  # [B, ceil(V / 8)] uint8
    owner_ends: tuple[int, ...]  # [N + 1], as row_ends

    def dropped(self, part: slice, *, first: int, width: int) -> Tensor:
        """Return which ids of [first, first + width) are masked out, [n, width] bool.

        Args:
            part: of consecutive tokens.
        """
        # One more column, for ids of other ranks.
        is_cut = self.is_cut[part]
        dropped = is_cut[:, None].repeat(1, width + 1)
        own = slice(self.row_ends[part.start], self.row_ends[part.stop])
        at = self.ids[own] - first
        at = torch.where((at >= 0) & (at < width), at, width)
        dropped[self.rows[own] - part.start, at] = False
        own = slice(self.owner_ends[part.start], self.owner_ends[part.stop])
        if own.stop > own.start:
            shifts = torch.arange(8, dtype=torch.uint8, device=self.bits.device)
            bits = ((self.bits[own][:, :, None] >> shifts) & 1).flatten(1)[:, : self.vocab]
            bits = F.pad(bits, (0, max(0, first + width - self.vocab)))[:, first : first + width]
            dropped[self.owners[own] - part.start, :width] = bits == 0
        return dropped[:, :width]


def make_sampling_mask(sets: SamplingMasks, device: torch.device | str) -> SamplingMask:
    """Move sampling masks from the CPU to a device, in the form in which they are applied."""
    (rows, ids), (owners, bits) = sets.ids(), sets.bitmaps()
    bounds = torch.arange(len(sets) + 1)
    return SamplingMask(
        vocab=sets.vocab,
        is_cut=(sets.sizes > 0).to(device),
        rows=rows.to(device),
        ids=ids.to(device),
        row_ends=tuple(torch.searchsorted(rows, bounds).tolist()),
        owners=owners.to(device),
        bits=bits.to(device),
        owner_ends=tuple(torch.searchsorted(owners, bounds).tolist()),
    )


@dataclass(frozen=True)
class SamplingRules:
    """How N scored tokens were sampled."""

    kept: SamplingMask | None = None
    """The ids that each was sampled among; None: all."""
    history: History | None = None
    """The ids before each, for penalties; None: no penalties."""

    def penalise(
        self, logits: Tensor, part: slice, *, penalties: Penalties, first: int, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """Apply penalties.

        Args:
            logits: [n, width] float32, before temperature, of ids from `first` on.
            part: the chunk, of consecutive tokens.
            penalties: of all tokens.
        Returns: see `penalise`.
        """
        assert self.history is not None
        where = dict(first=first, width=width)
        came = counts = None
        if penalties.repetition != 1:
            came = self.history.all.counts(part, **where) > 0
        if penalties.counts_response:
            counts = self.history.response.counts(part, **where)
        return penalise(logits, penalties, came=came, counts=counts, first=first)

    def dropped(self, part: slice, *, first: int, width: int) -> Tensor | None:
        """Return which ids of [first, first + width) are masked out, [n, width] bool; None: none.

        Args:
            part: the chunk, of consecutive tokens.
        """
        return None if self.kept is None else self.kept.dropped(part, first=first, width=width)


def make_sampling_rules(
    tokens: Tensor,
    lengths: Sequence[int],
    scored: Tensor,
    *,
    sampling_masks: SamplingMasks | None,
    drawn: Tensor | None,
    device: torch.device | str,
) -> SamplingRules | None:
    """Return how scored tokens of a packed row were sampled; None if by temperature alone.

    Args:
        tokens: [T] int64 on the CPU.
        lengths: tokens per sequence.
        scored: [N] int64 on the CPU, positions, ascending.
        sampling_masks: of the T tokens, on the CPU; None for none.
        drawn: [T] bool, tokens of responses, for penalties; None for none.
        device: of the result.
    """
    if sampling_masks is None and drawn is None:
        return None
    kept = None if sampling_masks is None else make_sampling_mask(sampling_masks[scored], device)
    if drawn is None:
        return SamplingRules(kept)
    return SamplingRules(kept, _history(tokens, lengths, drawn=drawn, scored=scored, device=device))
