"""A real run of two ranks: its timeline, who waits by the lines of train.py, and its profile."""

from __future__ import annotations

import ast
import gzip
import json

from spmdrl.report.timeline import read_timeline
from spmdrl.report.timeline_writer import PHASES, clean_name
from spmdrl.report.waits import critical_path, waits_of
from spmdrl.tools.commands.create_model import create_model
from tests.helpers.runs import ROOT, TINY, finish, metrics, start

# Writes for each phase the line of train.py that is in it.
SCRIPT = """
import os, runpy, sys

from spmdrl.world.spans import Spans

add = Spans.add


def noted(self, name, began, ended):
    frame = sys._getframe()
    while frame and not frame.f_code.co_filename.endswith("/train.py"):
        frame = frame.f_back
    if frame and frame.f_code.co_name == "train":
        with open({lines!r}, "a") as file:
            file.write(f"{{frame.f_lineno}} {{name}}\\n")
    add(self, name, began, ended)


Spans.add = noted
runpy.run_path({train!r}, run_name="__main__")
"""


def calls_of_lines() -> dict[int, set[str]]:
    """Return {line of train.py: what is called there}."""
    found: dict[int, set[str]] = {}
    for node in ast.walk(ast.parse((ROOT / "train.py").read_text())):
        if isinstance(node, ast.Call):
            found.setdefault(node.lineno, set()).add(ast.unparse(node.func))
    return found


def test_a_run_records_its_phases_and_traces_the_steps_that_it_is_asked_for(tmp_path):
    model = tmp_path / "model"
    create_model(model, hidden_size=64, layers=2, heads=2, kv_heads=1)
    script = tmp_path / "script.py"
    lines = tmp_path / "lines.txt"
    script.write_text(SCRIPT.format(lines=str(lines), train=str(ROOT / "train.py")))
    out = tmp_path / "run"
    flags = TINY["rl"] | {
        "model.path": model,
        "output-dir": out,
        "engine.kind": "transformers",
        "steps": 3,
        "evaluate.every-steps": 2,
        "data.eval-size": 4,
        "checkpoint.every-steps": 2,
        "report.profile.steps": "[1]",
        "report.profile.ranks": "[0, 1]",
    }
    finished = finish(start("demo_grpo.yaml", 2, script=script, **flags), timeout_s=400)
    assert finished.status in (0, 3), finished.output  # a random model may earn no reward

    calls = calls_of_lines()
    seen = [line.split(" ", 1) for line in lines.read_text().splitlines()]
    in_loop = [(int(number), name) for number, name in seen if name in PHASES]
    assert {name for _, name in in_loop} >= {"generate", "update", "push", "agree to stop"}
    loop = {phase.call for phase in PHASES.values()}
    for number, name in in_loop:
        if calls[number] & loop:
            assert PHASES[name].call in calls[number], (number, name)

    steps = read_timeline(out)
    assert [[(one.rank, one.step) for one in ranks] for ranks in steps] == [
        [(0, step), (1, step)] for step in range(3)
    ]
    rows = {row["step"]: row for row in metrics(out)}
    for ranks in steps:
        trainer, engine = ranks
        assert (trainer.replica, engine.replica) == (-1, 0)
        names = {span.name for span in trainer.spans}
        assert {"await_rollouts", "update", "await_peers", "push", "agree_to_stop"} - names <= {
            "agree_to_stop"  # of the step before; the first has none
        }
        seconds = sum(span.seconds for span in trainer.spans if span.name == "update")
        assert abs(seconds - rows[trainer.step]["time/update"]) < 1e-6
        row = rows[trainer.step]
        # Rank 1 sends all tokens to rank 0: id, version and mask, logprob, of four bytes each.
        assert row["perf/exchange_bytes"] == 12 * row["perf/batch_tokens"]
        assert row["perf/exchange_gb_per_s"] > 0 and row["perf/decode_gb_per_s"] > 0
        assert row["perf/engine_steps"] >= 1
        assert 0 < row["perf/trainer_bubble_frac"] <= 1 and 0 < row["perf/engine_bubble_frac"] <= 1
        assert "perf/decode_bandwidth_frac" not in row  # not known of a CPU
        assert waits_of(ranks)
        total = sum(part.seconds for part in critical_path(ranks))
        assert abs(total - rows[trainer.step]["perf/step_s"]) < 0.25 * total + 0.05

    assert "a step takes" in finished.output
    files = sorted(path.name for path in (out / "profile").iterdir())
    assert files == ["step_1_rank_0.json.gz", "step_1_rank_1.json.gz"]
    for rank, phase in ((0, "update"), (1, "generate")):
        text = gzip.decompress((out / "profile" / files[rank]).read_bytes())
        events = json.loads(text)["traceEvents"]
        ranges = {e["name"] for e in events if e.get("cat") == "user_annotation"}
        assert {phase, "push"} <= ranges
        own = [e for e in events if e.get("name") == phase and "dur" in e]
        spans = [s for s in steps[1][rank].spans if s.name == clean_name(phase)]
        longest = max(span.seconds for span in spans)
        assert abs(max(e["dur"] for e in own) / 1e6 - longest) < 0.1 * longest + 0.01
        assert any(e.get("cat") == "cpu_op" for e in events)
