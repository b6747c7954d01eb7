"""Which sequence goes to which update, dp rank and micro-batch: a pure function of lengths.

Every rank calls it with the same arguments and gets the same plan; integers only, so that no
two machines round differently. S sequences.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

_QUADRATIC_TOKENS = 24576
"""Length at which attention costs as much as the matrices: about 12 * hidden size, here of a
2048-wide model. Only the balance depends on it."""


@dataclass(frozen=True)
class Plan:
    """Where each of S sequences is trained."""

    update_ids: Tensor  # [S] int64
    dp_ids: Tensor  # [S] int64, data-parallel index
    microbatch_ids: Tensor  # [S] int64, position within its update on its dp rank
    num_microbatches: tuple[int, ...]  # per update, the same on every dp rank

    def rows(self, dp_id: int, *, update: int, microbatch: int) -> Tensor:
        """Return the sequences of one micro-batch: [s] int64, ascending; may be empty."""
        return torch.nonzero((self.dp_ids == dp_id) & (self.update_ids == update)
                             & (self.microbatch_ids == microbatch)).flatten()


def partition(
    lengths: Tensor, *, group_ids: Tensor, dp_size: int, tokens_per_microbatch: int,
    num_updates: int = 1, quadratic_tokens: int = _QUADRATIC_TOKENS,
) -> Plan:
    """Assign sequences to updates, dp ranks and micro-batches.

    Whole groups go to updates in the order of their ids. Within an update, sequences go
    longest first to the micro-batch with the least cost (length + length^2 /
    quadratic_tokens) that has room; the k-th micro-batches of all ranks, which run at the same
    time, are of neighbouring cost.

    Args:
        lengths: [S] int64, tokens. group_ids: [S] int64.
        dp_size: data-parallel ranks.
        tokens_per_microbatch: budget of one micro-batch, tokens.
        num_updates: mini-batches with an optimizer step each.
        quadratic_tokens: length at which the quadratic cost equals the linear one, tokens.
    Raises: ValueError when a sequence is longer than the budget.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > tokens_per_microbatch:
        row = int(lengths.argmax())
        raise ValueError(
            f"batch.tokens_per_microbatch: a sequence of group {int(group_ids[row])} has {longest} "
            f"tokens, above the budget of {tokens_per_microbatch}; raise it to at least {longest}"
        )
    ids, index = torch.unique(group_ids, return_inverse=True)
    update_ids = index * num_updates // max(len(ids), 1)
    dp_ids, microbatch_ids = torch.zeros_like(lengths), torch.zeros_like(lengths)
    counts = []
    for update in range(num_updates):
        rows = torch.nonzero(update_ids == update).flatten()
        bins = _pack(lengths[rows].tolist(), dp_size=dp_size, budget=tokens_per_microbatch,
                     quadratic=quadratic_tokens)
        counts.append(len(bins) // dp_size)
        for position, members in enumerate(bins):
            chosen = rows[members]
            microbatch_ids[chosen], dp_ids[chosen] = position // dp_size, position % dp_size
    return Plan(update_ids=update_ids, dp_ids=dp_ids, microbatch_ids=microbatch_ids,
                num_microbatches=tuple(counts))


def _pack(lengths: list[int], *, dp_size: int, budget: int, quadratic: int) -> list[list[int]]:
    """Return M * dp_size bins of positions; entry k * dp_size + d is micro-batch k of rank d."""
    costs = [n * quadratic + n * n for n in lengths]
    num_bins = dp_size * max(1, -(-sum(lengths) // (budget * dp_size)))
    while (bins := _fill(lengths, costs, num_bins=num_bins, budget=budget)) is None:
        num_bins += dp_size  # ends at the latest with one bin per sequence
    bins.sort(key=lambda members: -sum(costs[i] for i in members))
    dealt: list[list[int]] = []
    totals = [0] * dp_size
    for k in range(0, num_bins, dp_size):  # heaviest bin to the rank with the least so far
        order = sorted(range(dp_size), key=lambda d: (totals[d], d))
        at = dict(zip(order, bins[k:k + dp_size]))
        for d in range(dp_size):
            totals[d] += sum(costs[i] for i in at[d])
            dealt.append(at[d])
    return dealt


def _fill(
    lengths: list[int], costs: list[int], *, num_bins: int, budget: int
) -> list[list[int]] | None:
    """Return num_bins bins, longest sequence first into the cheapest with room; None if none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    heap = [(0, b) for b in range(num_bins)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = []
        while heap and room[heap[0][1]] < lengths[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heapq.heappop(heap)
        bins[b].append(i)
        room[b] -= lengths[i]
        for entry in (*full, (cost + costs[i], b)):
            heapq.heappush(heap, entry)
    return bins
