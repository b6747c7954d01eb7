"""The timeline: what is written, what is read, and who waits in which phase."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from spmdrl.check.values import value_problems
from spmdrl.errors import Refusal
from spmdrl.report.timeline import read_timeline
from spmdrl.report.timeline_writer import PHASES
from spmdrl.world.clock import Exchange, lead_of
from spmdrl.world.lost_peers.watch import Watch
from spmdrl.world.spans import Spans
from tests.helpers.built import made
from tests.helpers.report_world import FreeWatch, config, reporting

ROOT = Path(__file__).parents[2]
COMMENT = re.compile(r"# (all|trainers|replica)\b")
WIDTHS = ("", "replica", "trainers", "all")


def loop_calls() -> dict[str, str]:
    """Return {what a line of train.py's loop calls: who waits, as its comment says}."""
    text = (ROOT / "train.py").read_text()
    lines = text.splitlines()
    train = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "train")
    (loop,) = (node for node in train.body if isinstance(node, ast.For))
    found = {}
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and (match := COMMENT.search(lines[node.lineno - 1])):
            found[ast.unparse(node.func)] = match[1]
    return found


def test_the_table_of_phases_says_what_the_comments_of_the_loop_say():
    of_calls: dict[str, list[str]] = {}
    for phase in PHASES.values():
        of_calls.setdefault(phase.call, []).append(phase.waits)
    widest = {call: max(waits, key=WIDTHS.index) for call, waits in of_calls.items()}
    assert widest == loop_calls()


BEFORE_THE_LOOP = {
    "agree on log folder",
    "agree on prefixes",
    "agree on the reference",
    "build engine",
    "check rows",
    "check the inputs",
    "compare clocks",
    "compare configs",
    "compare tensors",
    "count rows",
    "create engine groups",
    "create groups",
    "engines built",
    "find checkpoint",
    "find reference logprobs",
    "load checkpoint",
    "load the policy",
    "meet",
    "plan stream",
    "probe",
    "read digests",
    "reference logprobs",
    "send reference logprobs",
    "share digests",
    "size micro-batches",
    "verify checkpoint",
}
AFTER_THE_LOOP = {"close engines", "leave", "see what was learnt"}
OF_OTHERS = {"export checkpoint", "logprobs"}  # a command's, and one for edits of the loop


def test_every_phase_and_wait_of_the_source_is_in_the_table_or_outside_of_the_loop():
    found = set()
    for path in (ROOT / "spmdrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            names = [k.value for k in node.keywords if k.arg == "wait"]
            if ast.unparse(node.func).endswith(("watch.wait", "watch.phase")):
                names.append(node.args[0])
            values = [n.value for n in names if isinstance(n, ast.Constant)]
            found |= {value for value in values if isinstance(value, str)}
    assert found == {*PHASES} | BEFORE_THE_LOOP | AFTER_THE_LOOP | OF_OTHERS


# --------------------------------------------------------------------------- recording


def test_a_step_has_the_phases_since_the_last_one_in_order(tmp_path):
    watch = FreeWatch()
    with reporting(config(tmp_path), watch=watch) as report:
        now = time.monotonic()
        watch.spans.add("await rollouts", now + 0.5, now + 0.6)  # inside what ends later
        watch.spans.add("generate", now, now + 2)
        watch.spans.add("my phase", now + 2, now + 3)
        report._timeline.write(0)
        report._timeline.write(1)
    (first,), (second,) = read_timeline(tmp_path)
    found = [(s.name, round(s.seconds, 3), s.waits) for s in first.spans]
    assert found == [
        ("generate", 2, "replica"),
        ("await_rollouts", 0.1, "all"),
        ("my_phase", 1, ""),
    ]
    assert 0 <= first.spans[0].start_s < 1
    assert first.spans[1].start_s - first.spans[0].start_s == pytest.approx(0.5, abs=1e-5)
    assert abs(first.began_unix_s - time.time()) < 60
    assert (first.rank, first.step, first.attempt, first.replica) == (0, 0, 1, -1)
    assert second.step == 1 and not second.spans and second.began_unix_s > first.began_unix_s
    assert read_timeline(tmp_path, first=1) == read_timeline(tmp_path, last=1)[1:]


def test_a_resumed_run_moves_the_lines_of_steps_that_it_does_again(tmp_path):
    with reporting(config(tmp_path), ending="stopped") as report:
        for step in range(4):
            report._timeline.write(step)
    folder = tmp_path / "timeline"
    text = (folder / "rank_0.jsonl").read_text()
    (folder / "rank_3.jsonl").write_text(text)  # the earlier attempt had more ranks
    with (folder / "rank_0.jsonl").open("a") as file:
        file.write('{"step": 4, "atte')  # killed while writing
    with reporting(config(tmp_path), step=2) as report:
        report._timeline.write(2)
    found = [[(one.rank, one.attempt) for one in ranks] for ranks in read_timeline(tmp_path)]
    assert found == [[(0, 1), (3, 1)], [(0, 1), (3, 1)], [(0, 2)]]
    for rank, lines in ((0, 3), (3, 2)):
        removed = tmp_path / "logs" / "attempt_2" / f"removed_timeline_{rank}.jsonl"
        assert len(removed.read_text().splitlines()) == lines


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"attempt": "1"}, "'1' as attempt, which must be a whole number"),
        ({"spans": [["a", 0, 1]]}, "as spans, which must be a list of .name, start_s"),
        ({"spans": [["a", 0, "1", ""]]}, "as spans"),
        ({"spans": [["a", 0, 1, "others"]]}, "as spans"),
        ({"began_unix_s": None}, "None as began_unix_s"),
    ],
)
def test_a_line_that_no_run_wrote_is_refused_with_its_place(tmp_path, change, problem):
    with reporting(config(tmp_path)) as report:
        report._timeline.write(0)
    path = tmp_path / "timeline" / "rank_0.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | change) + "\n")
    with pytest.raises(Refusal, match=f"rank_0.jsonl: line 1: holds .*{problem}"):
        read_timeline(tmp_path)


def test_the_end_of_a_timeline_is_read_from_a_whole_line_on(tmp_path):
    with reporting(config(tmp_path)) as report:
        for step in range(50):
            report._timeline.write(step)
    lines = (tmp_path / "timeline" / "rank_0.jsonl").read_bytes().splitlines(keepends=True)
    whole = len(b"".join(lines[-3:]))
    for more, steps in ((0, [47, 48, 49]), (-1, [48, 49]), (5, [47, 48, 49])):
        found = read_timeline(tmp_path, newest_bytes=whole + more)
        assert [ranks[0].step for ranks in found] == steps


def test_a_run_without_a_timeline_has_no_steps(tmp_path):
    assert read_timeline(tmp_path) == []


def test_the_watch_adds_every_phase_and_wait():
    watch = Watch(dist.HashStore(), rank=0, world_size=1, timeout_s=100)
    began = time.monotonic()
    with watch.wait("update", 3), watch.phase("inner", 3):
        pass
    watch.close()
    inner, outer = watch.spans.take()[0]
    assert (inner.name, outer.name) == ("inner", "update")
    assert began <= outer.began <= inner.began <= inner.ended <= outer.ended <= time.monotonic()


def test_stretches_that_follow_each_other_are_one_and_too_many_are_counted(monkeypatch):
    clock = iter([1.0, 1.2, 2.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    spans = Spans()
    for seconds in (0.5, 0.1995, 0.1):
        spans.add_last("engine idle reward", seconds)
    first, second = spans.take()[0]
    assert (first.began, first.ended) == (0.5, 1.2)
    assert (second.began, second.ended) == (1.9, 2.0)
    for i in range(700):
        spans.add("often", i, i + 0.5)
    spans.add("push", 700, 701)
    stretches, left_out = spans.take()
    assert left_out == 200 and len(stretches) == 501 and stretches[-1].name == "push"
    assert spans.take() == ([], 0)


# --------------------------------------------------------------------------- clocks


def test_the_lead_of_a_clock_lies_within_the_closest_bounds():
    lead = 7.25
    gathers = [  # when this rank and rank 0 enter and leave, by one clock
        ((0.0, 1.0), (0.2, 0.9)),
        ((2.0, 2.004), (2.001, 2.005)),
        ((3.0, 3.5), (3.3, 3.4)),
    ]
    own = [Exchange(a + lead, b + lead) for (a, b), _ in gathers]
    first = [Exchange(*theirs) for _, theirs in gathers]
    assert lead_of(own, first) == pytest.approx(lead, abs=0.004)


# --------------------------------------------------------------------------- the profile


@pytest.mark.parametrize(
    "profile, problem",
    [
        (dict(steps=(3, 10)), "report.profile.steps: 10 is beyond the run"),
        (dict(steps=(3,), ranks=(0, 2)), "report.profile.ranks: there is no rank 2: "),
        (dict(steps=(3,), ranks=()), "report.profile.ranks: names no rank"),
        (dict(steps=(3, 9), ranks=(0,)), ""),
    ],
)
def test_a_profile_of_steps_or_ranks_that_do_not_exist_is_refused(profile, problem):
    cfg = made(steps=10, layout=dict(world_size=2), report=dict(profile=profile))
    found = [text for text in value_problems(cfg) if text.startswith("report.")]
    assert len(found) == bool(problem) and all(re.match(problem, text) for text in found)


def test_a_disk_that_is_full_costs_only_the_profile(tmp_path, caplog):
    cfg = made(output_dir=str(tmp_path), report=dict(trackers=[], profile=dict(steps=(0,))))
    (tmp_path / "profile").write_text("in the way")
    with reporting(cfg) as report:
        report._profiler.end(0)
        report._profiler.end(1)
    assert "step_0_rank_0.json.gz: the profile cannot be written" in caplog.text
