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
class Partition:
    """Where each of S sequences is trained."""

    update_ids: Tensor  # [S] int64
    dp_ids: Tensor  # [S] int64, data-parallel index
    microbatch_ids: Tensor  # [S] int64, position within its update on its dp rank
    num_microbatches: tuple[int, ...]  # per update, the same on every dp rank

    def rows(self, dp_id: int, *, update: int, microbatch: int) -> Tensor:
        """Return the sequences of one micro-batch: [s] int64, ascending; may be empty."""
        return torch.nonzero(
            (self.dp_ids == dp_id)
            & (self.update_ids == update)
            & (self.microbatch_ids == microbatch)
        ).flatten()


def partition(
    lengths: Tensor,
    *,
    group_ids: Tensor,
    dp_size: int,
    tokens_per_microbatch: int,
    num_updates: int = 1,
    quadratic_tokens: int = _QUADRATIC_TOKENS,
    whole_groups: bool = False,
) -> Partition:
    """Assign sequences to updates, dp ranks and micro-batches.

    Whole groups go to updates in the order of their ids. Within an update, units (sequences,
    or whole groups) go longest first to the micro-batch with the least cost (length + length^2
    / quadratic_tokens of each sequence) that has room; the k-th micro-batches of all ranks,
    which run at the same time, are of neighbouring cost.

    Args:
        lengths: [S] int64, tokens. group_ids: [S] int64.
        dp_size: data-parallel ranks.
        tokens_per_microbatch: budget of one micro-batch, tokens.
        num_updates: mini-batches with an optimizer step each.
        quadratic_tokens: length at which the quadratic cost equals the linear one, tokens.
        whole_groups: keep the sequences of a group in one micro-batch.
    Raises: ValueError when a sequence, or a group that is to stay whole, is longer than the
        budget.
    """
    ids, index = torch.unique(group_ids, return_inverse=True)
    unit_of = index if whole_groups else torch.arange(len(lengths))  # [S]
    num_units = len(ids) if whole_groups else len(lengths)
    unit_lengths = lengths.new_zeros(num_units).index_add(0, unit_of, lengths)
    _check_budget(
        lengths, unit_lengths, unit_of=unit_of, group_ids=group_ids, budget=tokens_per_microbatch
    )
    costs = lengths * quadratic_tokens + lengths * lengths
    unit_costs = costs.new_zeros(num_units).index_add(0, unit_of, costs)
    update_ids = index * num_updates // max(len(ids), 1)
    unit_updates = update_ids.new_zeros(num_units).index_copy(0, unit_of, update_ids)
    unit_dp, unit_microbatch = torch.zeros_like(unit_lengths), torch.zeros_like(unit_lengths)
    counts = []
    for update in range(num_updates):
        units = torch.nonzero(unit_updates == update).flatten()
        bins = _pack(
            unit_lengths[units].tolist(),
            unit_costs[units].tolist(),
            dp_size=dp_size,
            budget=tokens_per_microbatch,
        )
        counts.append(len(bins) // dp_size)
        for position, members in enumerate(bins):
            chosen = units[members]
            unit_microbatch[chosen], unit_dp[chosen] = position // dp_size, position % dp_size
    return Partition(
        update_ids=update_ids,
        dp_ids=unit_dp[unit_of],
        microbatch_ids=unit_microbatch[unit_of],
        num_microbatches=tuple(counts),
    )


def _check_budget(
    lengths: Tensor, unit_lengths: Tensor, *, unit_of: Tensor, group_ids: Tensor, budget: int
) -> None:
    longest = int(unit_lengths.max()) if unit_lengths.numel() else 0
    if longest <= budget:
        return
    rows = torch.nonzero(unit_of == unit_lengths.argmax()).flatten()
    group, sizes = int(group_ids[rows[0]]), lengths[rows].tolist()
    what = f"a sequence of group {group} has {longest} tokens"
    if len(sizes) > 1:
        what = (
            f"the {len(sizes)} sequences of group {group}, which stay together, have "
            f"{' + '.join(map(str, sizes))} = {longest} tokens"
        )
    raise ValueError(
        f"batch.tokens_per_microbatch: {what}, above the budget of {budget}; raise "
        f"it to at least {longest}"
    )


def _pack(lengths: list[int], costs: list[int], *, dp_size: int, budget: int) -> list[list[int]]:
    """Return M * dp_size bins of positions; entry k * dp_size + d is micro-batch k of rank d."""
    num_bins = dp_size * max(1, -(-sum(lengths) // (budget * dp_size)))
    while (bins := _fill(lengths, costs, num_bins=num_bins, budget=budget)) is None:
        num_bins += dp_size  # ends at the latest with one bin per sequence
    bins.sort(key=lambda members: -sum(costs[i] for i in members))
    dealt: list[list[int]] = []
    totals = [0] * dp_size
    for k in range(0, num_bins, dp_size):  # heaviest bin to the rank with the least so far
        order = sorted(range(dp_size), key=lambda d: (totals[d], d))
        at = dict(zip(order, bins[k : k + dp_size]))
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
