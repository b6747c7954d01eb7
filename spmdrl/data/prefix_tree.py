"""The common prefixes of packed sequences, as a tree whose nodes are computed once.

The samples of a group begin with the same prompt. Episodes that branch begin with the same turns.
In a causal model the state of a token depends on this token and those before it. So equal prefixes
have equal states.

Shape letters: T tokens of a packed row, S sequences, C tokens of the tree, N nodes, K keys of all
nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LEAST = 16
"""Tokens of the shortest prefix that is shared. A node costs attention a kernel of its own, and
below about this many tokens the linear layers save less than that."""

_Bytes: TypeAlias = npt.NDArray[np.uint8]
Count = TypeVar("Count", int, float)


Path: TypeAlias = list[tuple[int, int]]
"""Nodes one after another, each as the span [begin, end) of the tree's tokens."""


@dataclass(frozen=True)
class PrefixTree:
    """Nodes are runs of tokens that the same sequences share; a node continues its parent.

    The tree's tokens are those of its nodes, one node after another, parents first.
    """

    sources: Tensor  # [C] int64, index in the row of a token that each of the tree's stands for
    places: Tensor  # [T] int64, index in the tree of each token of the row
    lengths: tuple[int, ...]  # [N], tokens of each node
    parents: tuple[int, ...]  # [N], the parent of each node; -1 for none

    @property
    def is_shared(self) -> bool:
        """Whether some token of the tree stands for several tokens of the row."""
        return len(self.sources) < len(self.places)

    def paths(self) -> list[Path]:
        """Return the path from a root to each node, which is the last on it."""
        found: list[Path] = []
        begin = 0
        for length, parent in zip(self.lengths, self.parents):
            before = found[parent] if parent >= 0 else []
            found.append([*before, (begin, begin + length)])
            begin += length
        return found


def separate(lengths: Sequence[int]) -> PrefixTree:
    """Return the tree in which each sequence is a node of its own."""
    tokens = torch.arange(sum(lengths))
    return PrefixTree(tokens, tokens, tuple(lengths), (-1,) * len(lengths))


def prefix_tree(
    tokens: Tensor, lengths: Sequence[int], *, also: Sequence[Tensor] = (), least: int = LEAST
) -> PrefixTree:
    """Return the tree of the common prefixes of packed sequences.

    Args:
        tokens: [T] int64 on the CPU. lengths: [S], tokens per sequence.
        also: [T, ...] on the CPU, values that must be equal too where two tokens are one.
        least: tokens of the shortest prefix that is shared.
    """
    if len(lengths) < 2:
        return separate(lengths)
    values = np.concatenate([_as_bytes(own) for own in (tokens, *also)], axis=1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    own = [values[begin:end] for begin, end in zip(starts, starts[1:])]
    order = _sorted(own)
    common = [_common(own[a], own[b]) for a, b in zip(order, order[1:])]
    if max(common) < least:
        return separate(lengths)
    return _Growing(starts, order, common, least).tree()


def surely_shared(
    tokens: Tensor, spans: Sequence[tuple[int, int]], *, also: Sequence[Tensor] = ()
) -> list[int]:
    """Return how many of its tokens each sequence surely shares with the one before it.

    Both must be in one row. The tree may share more. It is 0 for the first sequence.

    Args:
        tokens, also: see `prefix_tree`. spans: [begin, end) of each sequence.
    """
    values = np.concatenate([_as_bytes(own) for own in (tokens, *also)], axis=1)
    own = [values[begin:end] for begin, end in spans]
    found = [surely_of(_common(a, b)) for a, b in zip(own, own[1:])]
    return [0, *found][: len(own)]


def by_prefix(tokens: Tensor, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the order of sequences in which each has no longer prefix in common with any other
    than with a neighbour.

    Args:
        tokens: see `prefix_tree`. spans: [begin, end) of each sequence.
    """
    values = _as_bytes(tokens)
    return _sorted([values[begin:end] for begin, end in spans])


def _sorted(sequences: Sequence[_Bytes]) -> list[int]:
    return sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())


def surely_of(common: Count) -> Count:
    """Return how many tokens of a common prefix of two sequences are surely computed once.

    If a third sequence branches off near its end, the tokens after that branch are shared only if
    there are at least LEAST of them.
    """
    return max(0, common - LEAST + 1)


def _as_bytes(values: Tensor) -> _Bytes:
    """Return [T, ...] as the bytes of each token, [T, n]."""
    flat = np.ascontiguousarray(values.numpy())
    return flat.reshape(len(values), math.prod(values.shape[1:])).view(np.uint8)


def _common(one: _Bytes, other: _Bytes) -> int:
    """Return how many tokens are equal before the first that differs."""
    count = min(len(one), len(other))
    differs = (one[:count] != other[:count]).any(axis=1)
    return int(differs.argmax()) if differs.any() else count


class _Growing:
    """Finds the nodes of a tree, parents first.

    Args:
        starts: [S + 1], where each sequence begins in the row.
        order: [S], the sequences, sorted so that those with a common prefix are neighbours.
        common: [S - 1], how many tokens each sequence in `order` has in common with the next.
        least: see `prefix_tree`.
    """

    def __init__(
        self, starts: npt.NDArray[np.int64], order: list[int], common: list[int], least: int
    ):
        self._starts = starts
        self._order = order
        self._common = common
        self._least = least
        self._sources: list[npt.NDArray[np.int64]] = []
        self._places = np.empty(starts[-1], np.int64)
        self._lengths: list[int] = []
        self._parents: list[int] = []
        self._size = 0

    def tree(self) -> PrefixTree:
        """Return the tree of all sequences."""
        # (first, end, depth, parent): sequences [first, end) of `order`, which share their first
        # `depth` tokens. These are in the tree already, up to the end of the node `parent`.
        waiting = [(0, len(self._order), 0, -1)]
        while waiting:
            first, end, depth, parent = waiting.pop()
            parts = self._parts(first, end, depth)
            if len(parts) > 1:
                waiting += [(*part, depth, parent) for part in reversed(parts)]
                continue
            if end - first == 1:
                own = self._order[first]
                until = int(self._starts[own + 1] - self._starts[own])
                self._add(first, end, depth, until, parent)
                continue
            until = min(self._common[first : end - 1])
            node = self._add(first, end, depth, until, parent)
            waiting += [(*part, until, node) for part in reversed(self._parts(first, end, until))]
        return PrefixTree(
            torch.from_numpy(np.concatenate(self._sources)),
            torch.from_numpy(self._places),
            tuple(self._lengths),
            tuple(self._parents),
        )

    def _parts(self, first: int, end: int, depth: int) -> list[tuple[int, int]]:
        """Cut [first, end) into spans that share `least` tokens or more after the first `depth`."""
        borders = [at + 1 for at in range(first, end - 1) if self._common[at] < depth + self._least]
        return list(zip([first, *borders], [*borders, end]))

    def _add(self, first: int, end: int, depth: int, until: int, parent: int) -> int:
        """Add tokens [depth, until) of sequences [first, end) as a node; return its index, or that
        of its parent if there are no such tokens."""
        if until == depth:
            return parent
        starts = [self._starts[self._order[at]] for at in range(first, end)]
        self._sources.append(np.arange(starts[0] + depth, starts[0] + until))
        for start in starts:
            self._places[start + depth : start + until] = np.arange(
                self._size, self._size + until - depth
            )
        self._size += until - depth
        self._lengths.append(until - depth)
        self._parents.append(parent)
        return len(self._lengths) - 1
