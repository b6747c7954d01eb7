"""Deal prompts to engine replicas by their expected costs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def deal(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Deal slots to parts with even counts, and with sums of cost as even as the counts allow.

    Each slot, the costliest first, goes to the part with the smallest sum that has room (Graham
    1969, with a bound on the count). If all costs are equal, slot i goes to part i mod parts.

    Args:
        costs: of each slot, any unit; not negative.
        parts: number of parts, at least 1.
    Returns: the slots of each part, the costliest first.
    """
    sizes = [len(range(part, len(costs), parts)) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in sizes]
    able = [(0.0, 0, part) for part in range(parts)]  # (sum, count, part), a heap
    for slot in sorted(range(len(costs)), key=lambda slot: (-costs[slot], slot)):
        total, count, part = heapq.heappop(able)
        dealt[part].append(slot)
        if count + 1 < sizes[part]:
            heapq.heappush(able, (total + costs[slot], count + 1, part))
    return dealt


def deal_again(
    left: Mapping[int, Sequence[int]], *, costs_of: Mapping[int, Sequence[float]], parts: int
) -> dict[int, list[list[int]]]:
    """Deal the remaining slots of some steps to a new number of parts.

    Args:
        left: {step: remaining slots}.
        costs_of: {step: cost of each of its slots}.
        parts: number of parts.
    Returns: {step: slots of each part}, without steps that have no slots left.
    """
    dealt_again = {}
    for step in sorted(left):
        slots = sorted(left[step])
        dealt = deal([costs_of[step][slot] for slot in slots], parts)
        if slots:
            dealt_again[step] = [[slots[i] for i in part] for part in dealt]
    return dealt_again
