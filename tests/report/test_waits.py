"""Who waited for whom, and what made a step as long as it is."""

from __future__ import annotations

import gzip
import json

import pytest

from spmdrl.errors import Refusal
from spmdrl.report.timeline import RankStep, Span, read_timeline
from spmdrl.report.waits import PhasePart, critical_path, parts_of, waits_of
from spmdrl.tools.commands.timeline import timeline, trace_events

START = 1.7e9


def rank(number: int, *spans: tuple, began: float = 0.0, replica: int = -1, step: int = 3):
    """Return what a rank did: spans of (name, begin, end, who waits), seconds after START."""
    own = tuple(Span(name, start - began, end - start, waits) for name, start, end, waits in spans)
    return RankStep(number, step, 1, f"host{number // 2}", replica, START + began, own)


def step_of_two(step: int = 3, at: float = 0.0):
    """Rank 1 samples for 6 s, of which it scores for 2, while rank 0 updates for 3."""
    return [
        rank(
            0,
            ("await_rollouts", at + 0.5, at + 1.5, "all"),
            ("update", at + 1.5, at + 4.5, "trainers"),
            ("await_peers", at + 4.5, at + 8, "all"),
            ("push", at + 8, at + 9, "all"),
            began=at,
            step=step,
        ),
        rank(
            1,
            ("generate", at + 0.25, at + 1.25, "replica"),
            ("await_rollouts", at + 1.25, at + 1.5, "all"),
            ("generate", at + 1.75, at + 7.75, "replica"),
            ("engine_idle_reward", at + 5, at + 7, ""),
            ("await_peers", at + 7.75, at + 8, "all"),
            ("push", at + 8, at + 9, "all"),
            began=at + 0.25,
            replica=0,
            step=step,
        ),
    ]


def seconds(parts: list[PhasePart]) -> list[tuple[int, str, float]]:
    return [(part.rank, part.name, round(part.seconds, 3)) for part in parts]


def test_a_rank_waits_from_its_entry_to_that_of_the_last_one():
    first, second = waits_of(step_of_two())
    assert (first.name, first.rank, first.for_rank) == ("await_peers", 0, 1)
    assert (first.doing, second.doing) == ("engine_idle_reward", "generate")
    assert first.seconds == pytest.approx(3.25) and first.began_unix_s == START + 4.5
    assert (second.name, second.seconds) == ("await_rollouts", pytest.approx(0.75))


def test_what_the_last_rank_did_is_its_longest_innermost_phase():
    late = [("generate", 0, 10, "replica"), ("engine_idle_reward", 4, 9, "")]
    ranks = [rank(0, ("push", 3, 11, "all")), rank(1, *late, ("push", 10, 11, "all"), replica=0)]
    (wait,) = waits_of(ranks)
    assert wait.doing == "engine_idle_reward" and wait.seconds == pytest.approx(7)


def test_ranks_of_a_replica_wait_for_each_other_alone_and_for_each_call_apart():
    ranks = [
        rank(0, ("generate", 0, 5, "replica"), ("generate", 6, 9, "replica"), replica=0),
        rank(1, ("generate", 1, 5, "replica"), ("generate", 6, 9, "replica"), replica=0),
        rank(2, ("generate", 4, 5, "replica"), replica=1),
        rank(3, ("push", 2, 3, ""), replica=-1),  # nobody waits
    ]
    assert [(w.rank, w.for_rank, round(w.seconds, 3)) for w in waits_of(ranks)] == [(0, 1, 1.0)]


def test_a_rank_that_left_before_the_last_one_came_waited_until_then():
    ranks = [rank(0, ("push", 1, 2, "all")), rank(1, ("push", 5, 6, "all"))]
    assert [round(wait.seconds, 3) for wait in waits_of(ranks)] == [1.0]


def test_parts_are_innermost_and_leave_no_gap():
    one = rank(
        0,
        ("generate", 1, 5, "replica"),
        ("engine_idle_reward", 2, 3, ""),
        ("await_other_replicas", 3, 4, "replica"),
        ("push", 6, 7, "all"),
    )
    assert seconds(parts_of(one, START, START + 8)) == [
        (0, "other", 1),
        (0, "generate", 1),
        (0, "engine_idle_reward", 1),
        (0, "await_other_replicas", 1),
        (0, "generate", 1),
        (0, "other", 1),
        (0, "push", 1),
        (0, "other", 1),
    ]
    assert seconds(parts_of(one, START + 2.5, START + 3.5)) == [
        (0, "engine_idle_reward", 0.5),
        (0, "await_other_replicas", 0.5),
    ]


def test_the_critical_path_goes_over_to_the_rank_that_was_waited_for():
    path = critical_path(step_of_two())
    assert seconds(path) == [
        (1, "generate", 1),
        (1, "await_rollouts", 0.25),
        (1, "other", 0.25),
        (1, "generate", 3.25),
        (1, "engine_idle_reward", 2),
        (1, "generate", 0.75),
        (0, "await_peers", 0.25),
        (0, "push", 1),
    ]
    # It has no gap, from the begin of the step to its end: what is not on it makes nothing longer.
    for before, after in zip(path, path[1:]):
        assert before.ended_unix_s == after.began_unix_s
    assert path[0].began_unix_s == START + 0.25 and path[-1].ended_unix_s == START + 9


def test_the_critical_path_of_one_rank_is_all_that_it_did():
    alone = [rank(0, ("update", 1, 2, "trainers"))]
    assert seconds(critical_path(alone)) == [(0, "other", 1), (0, "update", 1)]
    assert critical_path([]) == [] and waits_of(alone) == []


# --------------------------------------------------------------------------- the command


@pytest.fixture
def run(tmp_path):
    """A run of the steps 3 and 4, as its ranks write it."""
    (tmp_path / "timeline").mkdir()
    for at, step in ((0.0, 3), (10.0, 4)):
        for one in step_of_two(step, at):
            head = {"step": step, "attempt": 1, "host": one.host, "replica": one.replica}
            spans = [[s.name, s.start_s, s.seconds, s.waits] for s in one.spans]
            row = head | {"began_unix_s": one.began_unix_s, "spans": spans}
            with (tmp_path / "timeline" / f"rank_{one.rank}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    return tmp_path


def test_the_command_names_who_waited_for_whom_the_longest_first(run):
    assert timeline(run, steps=(3, 4)).splitlines() == [
        "steps 3 to 4: 8.750 s a step on 2 ranks",
        "",
        "the phases that made it so long (nothing else would shorten it):",
        "   57.1%    10.000 s  generate, on rank 1",
        "   22.9%     4.000 s  engine_idle_reward, on rank 1",
        "   11.4%     2.000 s  push, on rank 0",
        "    2.9%     0.500 s  await_rollouts, on rank 1",
        "    2.9%     0.500 s  other, on rank 1",
        "    2.9%     0.500 s  await_peers, on rank 0",
        "",
        "who waited for whom, the longest first:",
        "      6.500 s  rank 0 in await_peers for rank 1, which was in engine_idle_reward",
        "      1.500 s  rank 0 in await_rollouts for rank 1, which was in generate",
    ]
    assert timeline(run, steps=(4,), limit=1).splitlines()[-2:] == [
        "      3.250 s  rank 0 in await_peers for rank 1, which was in engine_idle_reward",
        "  ... and 1 shorter ones (--limit)",
    ]


@pytest.mark.parametrize(
    "steps, problem",
    [((7, 9), "no step from 7 to 9"), ((1, 2, 3), "a first and a last step, not 3 numbers")],
)
def test_the_command_refuses_steps_that_are_not_there(run, steps, problem):
    with pytest.raises(Refusal, match=problem):
        timeline(run, steps=steps)


def test_a_trace_has_a_process_for_each_machine_and_nested_phases(run):
    timeline(run, out=run / "trace.json.gz")
    events = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))["traceEvents"]
    assert events == [*trace_events(read_timeline(run))]
    named = {
        (e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    assert named == {
        ("process_name", "host0"),
        ("thread_name", "rank 0"),
        ("thread_name", "rank 1"),
    }
    slices = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in slices if e["tid"] == 0 and e["name"].startswith("step")] == [
        "step 3",
        "step 4",
    ]
    for number in (0, 1):  # else a viewer drops a slice
        open_ends: list[float] = []
        for event in sorted((e for e in slices if e["tid"] == number), key=lambda e: e["ts"]):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 1e-3, event
            open_ends.append(end)
    waited = [e for e in slices if "waited for" in e["args"]]
    assert waited[0]["args"]["waited for"] == "rank 1, in generate"
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 4
    assert all(starts[i]["tid"] == 1 and ends[i]["tid"] == 0 for i in starts)
    assert all(starts[i]["ts"] == ends[i]["ts"] for i in starts)
