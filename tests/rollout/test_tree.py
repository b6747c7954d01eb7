"""The tree of an agent's episode: each sampled token is trained on once, in the first trace that
holds it; an agent that begins again gets the same answers."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch

from spmdrl.agents.messages import NO_PARENT, Ask
from spmdrl.columns import RouterRoutes
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.rollout.tree import Tree
from spmdrl.sampling_masks import SamplingMasks
from tests.helpers.drawn import completion

ROOM = 9


def ask(
    number: int,
    tokens: tuple[int, ...],
    parent: int = NO_PARENT,
    *,
    samples: int = 1,
    max_tokens: int = 4,
    stop: tuple[str, ...] = (),
) -> Ask:
    return Ask("train-0-0-0", number, parent, tokens, samples, max_tokens, stop)


def played(tree: Tree, asked: Ask, *answers: list[int], room: int = ROOM) -> list[int]:
    """Add a request and complete its samples; return their nodes."""
    nodes = tree.add(asked, room=room).nodes
    for node, tokens in zip(nodes, answers, strict=True):
        drawn = completion(tokens, logprobs=[-0.5 * t for t in tokens], versions=[2] * len(tokens))
        tree.draw(node, drawn, is_complete=True)
    return [*nodes]


def columns(trace: Trajectory) -> tuple[list, ...]:
    """Return ids, mask, logprobs and versions of a trace."""
    return tuple(
        getattr(trace, name).tolist()
        for name in ("tokens", "response_mask", "rollout_logprobs", "policy_versions")
    )


def compacted() -> Tree:
    """An agent that continues its first answer twice, and begins a new trace in between."""
    tree = Tree(seed=5)
    (first,) = played(tree, ask(0, (1, 2)), [3, 4])
    (second,) = played(tree, ask(1, (5,), first), [6])
    played(tree, ask(2, (8, 9)), [10])
    played(tree, ask(3, (7,), first), [11])
    played(tree, ask(4, (12,), second), [13])
    return tree


def test_traces_are_those_of_the_leaves_in_order_and_a_sampled_token_is_in_one_mask():
    traces = compacted().traces()
    assert [trace.tokens.tolist() for trace in traces] == [
        [8, 9, 10],
        [1, 2, 3, 4, 7, 11],
        [1, 2, 3, 4, 5, 6, 12, 13],
    ]
    sampled = [trace.tokens[trace.response_mask].tolist() for trace in traces]
    assert sampled == [[10], [3, 4, 11], [6, 13]]
    assert [trace.num_turns for trace in traces] == [1, 2, 2]
    assert [trace.num_prompt_tokens for trace in traces] == [2, 2, 2]
    for trace in traces:
        is_context = ~trace.response_mask
        assert not trace.rollout_logprobs[is_context].any()
        assert set(trace.policy_versions[is_context].tolist()) == {-1}
        drawn = trace.tokens[trace.response_mask]
        assert torch.equal(trace.rollout_logprobs[trace.response_mask], -0.5 * drawn)
        assert set(trace.policy_versions[trace.response_mask].tolist()) == {2}


def test_a_tree_without_branches_is_the_trajectory_of_an_environments_episode():
    tree = Tree(seed=1)
    (first,) = played(tree, ask(0, (1, 2)), [3, 4])
    played(tree, ask(1, (5, 6), first), [7])
    (trace,) = tree.traces()
    drawn = [
        completion(t, logprobs=[-0.5 * i for i in t], versions=[2] * len(t)) for t in ([3, 4], [7])
    ]
    chain = Trajectory.from_prompt([1, 2]).append_completion(drawn[0]).end_turn(-1)
    chain = chain.append_answer([5, 6]).append_completion(drawn[1]).end_turn(-1)
    assert columns(trace) == columns(chain)
    assert replace(trace, **chain.token_fields()) == chain


def test_all_samples_of_a_request_are_traces_and_any_of_them_may_go_on():
    tree = Tree(seed=1)
    nodes = played(tree, ask(0, (1,), samples=3), [2], [3], [4])
    played(tree, ask(1, (5,), nodes[1]), [6])
    assert [trace.tokens.tolist() for trace in tree.traces()] == [[1, 2], [1, 4], [1, 3, 5, 6]]
    call = tree.calls[0]
    assert [*call.nodes] == nodes == [0, 1, 2]
    assert tree.num_asked == 4


def test_a_node_that_its_agent_has_not_got_cannot_be_continued():
    tree = Tree(seed=1)
    tree.add(ask(0, (1,), samples=2), room=ROOM)
    tree.draw(0, completion([2]), is_complete=True)
    for parent in (0, 1, 7, -2):
        with pytest.raises(ValueError, match=f"continues node {parent}, which is not"):
            tree.read_by(ask(1, (5,), parent))
    tree.draw(1, completion([3]), is_complete=True)
    assert tree.read_by(ask(1, (5, 6), 1)) == ([1, 3, 5, 6], 1)


def test_answers_that_are_not_complete_are_in_no_trace():
    tree = Tree(seed=1)
    assert tree.traces() == ()
    played(tree, ask(0, (1,)), [2])
    tree.add(ask(1, (9,), samples=2), room=ROOM)
    tree.draw(1, completion([3]), is_complete=True)  # of two samples, of which one is not drawn
    assert [trace.tokens.tolist() for trace in tree.traces()] == [[1, 2]]
    assert tree.unfinished == [2]


# --------------------------------------------------------------------------- begin again


def test_an_agent_that_begins_again_gets_the_answers_of_equal_requests_in_any_order():
    tree = Tree(seed=1)
    played(tree, ask(0, (1,)), [2])
    played(tree, ask(1, (1,)), [3])
    played(tree, ask(2, (4,)), [5])
    tree.unclaim()
    assert tree.traces() == () and tree.num_asked == 0
    other = tree.claim(ask(0, (4,)))
    assert other is tree.calls[2]
    assert tree.claim(ask(1, (1,))) is tree.calls[0]
    for unequal in (
        ask(2, (1, 1)),
        ask(2, (1,), samples=2),
        ask(2, (1,), max_tokens=3),
        ask(2, (1,), stop=("x",)),
    ):
        assert tree.claim(unequal) is None
    assert [trace.tokens.tolist() for trace in tree.traces()] == [[1, 2], [4, 5]]
    assert tree.claim(ask(2, (1,))) is tree.calls[1]
    assert tree.claim(ask(3, (1,))) is None  # all are claimed
    assert [trace.tokens.tolist() for trace in tree.traces()] == [[1, 2], [1, 3], [4, 5]]


def test_a_request_equals_another_by_all_ids_that_it_reads_whatever_it_continues():
    tree = Tree(seed=1)
    (first,) = played(tree, ask(0, (1,)), [2])
    played(tree, ask(1, (3,), first), [4])
    tree.unclaim()
    whole = tree.claim(ask(0, (1, 2, 3)))
    assert whole is tree.calls[1]
    assert [trace.tokens.tolist() for trace in tree.traces()] == [[1, 2, 3, 4]]


def test_a_claimed_answer_may_still_be_in_the_engine():
    tree = Tree(seed=1)
    tree.add(ask(0, (1,)), room=ROOM)
    tree.draw(0, completion([2]), is_complete=False)
    tree.unclaim()
    call = tree.claim(ask(0, (1,)))
    assert call is tree.calls[0] and not tree.is_complete(call)
    tree.draw(0, completion([3]), is_complete=True)
    assert tree.is_complete(call)
    assert [trace.tokens.tolist() for trace in tree.traces()] == [[1, 2, 3]]


def test_seeds_depend_on_what_is_read_and_not_on_the_order_of_requests():
    def seeds(tree: Tree, asks: list[Ask]) -> list[int]:
        return [tree.add(one, room=ROOM).seed for one in asks]

    asks = [ask(0, (1,)), ask(1, (2,)), ask(2, (1,)), ask(3, (1,), max_tokens=2)]
    forward = seeds(Tree(seed=1), asks)
    backward = seeds(Tree(seed=1), [asks[1], asks[3], asks[0], asks[2]])
    assert forward == [backward[2], backward[0], backward[3], backward[1]]
    assert len({*forward, *seeds(Tree(seed=2), asks)}) == 8
    assert all(0 <= seed < 2**63 for seed in forward)


# --------------------------------------------------------------------------- reports of engines


def test_a_trace_is_truncated_where_the_run_and_not_the_agent_cut_it():
    tree = Tree(seed=1)
    for number, (room, drawn) in enumerate([(4, 4), (9, 4), (2, 2)]):
        tree.add(ask(number, (number,)), room=room)
        tree.draw(number, completion([7] * drawn, is_truncated=True), is_complete=True)
    assert [trace.is_truncated for trace in tree.traces()] == [True, False, True]
    assert all(node.is_truncated for node in tree.nodes)
    played(tree, ask(3, (5,), 0), [6])
    assert [trace.is_truncated for trace in tree.traces()] == [False, True, False]


def routes(first: int, count: int) -> dict:
    """Return routes of `count` tokens, numbered from `first`."""
    rows = torch.arange(first, first + count, dtype=torch.int8).view(count, 1, 1)
    return {"routes": RouterRoutes(rows)}


def test_columns_of_prompts_keep_the_first_report_of_each_token():
    tree = Tree(seed=1)
    tree.add(ask(0, (1, 2)), room=ROOM)
    tree.draw(0, replace(completion([3]), extra_columns=routes(10, 2)), is_complete=False)
    tree.draw(0, replace(completion([4]), extra_columns=routes(20, 3)), is_complete=True)
    tree.add(ask(1, (5,), 0, samples=2), room=ROOM)
    for node, first in ((1, 30), (2, 40)):
        drawn = replace(completion([6, 7]), extra_columns=routes(first, 6))
        tree.draw(node, drawn, is_complete=True)
    traces = tree.traces()
    assert [trace.extra_columns["routes"].rows.flatten().tolist() for trace in traces] == [
        [10, 11, 22, 33, 34, 35],
        [10, 11, 22, 43, 44, 45],
    ]


def test_sampling_masks_are_those_of_the_trace_that_trains_on_the_token():
    tree = Tree(seed=1)
    allowed = torch.zeros(1, 64, dtype=torch.bool)
    allowed[0, 3] = True
    masks = {"sampling_masks": SamplingMasks.from_allowed(allowed)}
    tree.add(ask(0, (1,)), room=ROOM)
    tree.draw(0, replace(completion([3]), extra_columns=masks), is_complete=True)
    played(tree, ask(1, (2,), 0, samples=2), [4], [5])
    sizes = [
        masks.sizes.tolist() if (masks := SamplingMasks.of(trace.extra_columns)) else []
        for trace in tree.traces()
    ]
    assert sizes == [[0, 4, 0, 0], []]


def test_a_tree_is_saved_as_plain_data_and_goes_on_as_it_was():
    tree = compacted()
    tree.calls[1].id = -1
    tree.add(ask(5, (14,), samples=2), room=3)
    unfinished = tree.with_drawn(
        {5: replace(completion([15], versions=[3]), extra_columns=routes(50, 1))}
    )
    assert not len(tree.nodes[5].sampled.tokens)  # the engine still has the request
    file = io.BytesIO()
    torch.save(unfinished.state_dict(), file)
    file.seek(0)
    restored = Tree.from_state_dict(torch.load(file, weights_only=True))
    assert restored.calls == unfinished.calls and restored.seed == tree.seed
    assert restored.unfinished == [5, 6]
    assert restored.path(5).tokens.tolist() == [14, 15]
    one, other = (
        [columns(trace) for trace in either.traces()] for either in (restored, unfinished)
    )
    assert one == other
    restored.draw(5, replace(completion([16]), extra_columns=routes(60, 2)), is_complete=True)
    assert restored.path(5).extra_columns["routes"].rows.flatten().tolist() == [50, 61]
