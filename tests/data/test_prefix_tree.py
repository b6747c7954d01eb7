"""Trees of the common prefixes of packed sequences."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.data.prefix_tree import LEAST, PrefixTree, by_prefix, prefix_tree, surely_shared

PROMPT = list(range(100, 120))


def _tree(sequences: list[list[int]], **options) -> PrefixTree:
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return prefix_tree(tokens, [len(sequence) for sequence in sequences], **options)


def _read(tree: PrefixTree, tokens: Tensor, lengths: list[int]) -> None:
    """Check that each token is at the end of a path that spells its sequence up to it."""
    of_tree = tokens[tree.sources]
    paths = tree.paths()
    spelt: dict[int, list[int]] = {}
    for path in paths:
        at = [i for span in path for i in range(*span)]
        begin, end = path[-1]
        for i in range(begin, end):
            spelt[i] = of_tree[at[: len(at) - (end - 1 - i)]].tolist()
    start = 0
    for length in lengths:
        sequence = tokens[start : start + length].tolist()
        for offset in range(length):
            assert spelt[int(tree.places[start + offset])] == sequence[: offset + 1]
        start += length


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=9),
    st.integers(1, 4),
)
def test_each_token_ends_a_path_that_spells_its_sequence(sequences, least):
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    tree = prefix_tree(tokens, lengths, least=least)
    _read(tree, tokens, lengths)
    assert sum(tree.lengths) == len(tree.sources)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    # Each neighbour in order shares all but less than `least` of what it could.
    lost = sum(tree.lengths) - _fewest(sequences)
    assert 0 <= lost <= (least - 1) * (len(sequences) - 1)


def _fewest(sequences: list[list[int]]) -> int:
    """Return the number of different prefixes."""
    return len({tuple(own[: end + 1]) for own in sequences for end in range(len(own))})


def test_samples_and_branches_share_what_they_begin_with():
    turn = [7] * 30
    sequences = [PROMPT + [1], PROMPT + turn + [2, 3], PROMPT + [4] * 5, PROMPT + turn + [5]]
    tree = _tree(sequences)
    assert len(tree.sources) == len(PROMPT) + len(turn) + 1 + 2 + 5 + 1
    assert sorted(tree.lengths) == [1, 1, 2, 5, 20, 30]
    assert sorted(len(path) for path in tree.paths()) == [1, 2, 2, 2, 3, 3]


def test_equal_sequences_are_one_and_short_prefixes_are_not_shared():
    assert _tree([PROMPT, PROMPT]).lengths == (len(PROMPT),)
    short = PROMPT[: LEAST - 1]
    assert not _tree([short + [1], short + [2]]).is_shared
    # A few more common tokens are no branch of their own.
    assert len(_tree([PROMPT + [1, 2, 3], PROMPT + [1, 2, 4], PROMPT + [9]]).lengths) == 4


def test_tokens_with_other_routes_are_not_the_same():
    tokens = torch.tensor(2 * [*PROMPT, 1])
    routes = torch.zeros(42, 2, 3, dtype=torch.int16)
    assert prefix_tree(tokens, [21, 21], also=(routes,)).lengths == (21,)
    routes[21 + 18, 1, 2] = 5
    assert prefix_tree(tokens, [21, 21], also=(routes,)).lengths == (18, 3, 3)


def test_what_begins_alike_is_put_together():
    rows = [[*PROMPT, 1, 2], [9, 9], [*PROMPT, 1, 3], [9], [*PROMPT, 2], [*PROMPT, 1]]
    ends = [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
    order = by_prefix(
        torch.tensor([token for row in rows for token in row]), [*zip(ends, ends[1:])]
    )
    assert sorted(order) == list(range(6))
    places = [order.index(row) for row in range(6)]
    assert {places[1], places[3]} in ({0, 1}, {4, 5})
    of_one = sorted(places[row] for row in (0, 2, 5))
    assert of_one[2] - of_one[0] == 2


def test_what_is_surely_shared_is_less_than_a_branch_below_what_is_common():
    tokens = torch.tensor([*PROMPT, 1, *PROMPT, 2, 3, *PROMPT[:10], *PROMPT[:17]])
    spans = [(0, 21), (21, 43), (43, 53), (53, 70)]
    assert surely_shared(tokens, spans) == [0, 20 - LEAST + 1, 0, 0]
    assert surely_shared(tokens[:0], [(0, 0)], also=(torch.zeros(0, 2, 3),)) == [0]
    assert surely_shared(tokens[:0], []) == []
