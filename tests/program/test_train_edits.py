"""Experiments that are edits of a few lines of train.py, those of docs/editing.md, run for real."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

from spmdrl.tools.commands.create_model import create_model
from spmdrl.types import Batch
from tests.helpers.policy_runs import scalars
from tests.helpers.runs import ROOT, TINY, metrics, run

# A prompt's samples all get 1 for every second prompt: these groups are solved.
REWARDS = """
def half(prompts, completions, **columns):
    solved = [sum(map(ord, str(p))) % 2 for p in prompts]
    return [1.0 if s else len(str(c)) % 5 / 10 for s, c in zip(solved, completions)]
"""

FINISH = "checkpoints.finish()  # all: the last checkpoint is on disk"
TRAIN = "# Every rank makes every part. A part is empty on ranks that have no share in it."
MARK = re.compile(r"  # (all|trainers|replica)\b")
WATCHED = """import json, linecache, sys
waits = set()
watched = world.watch.wait
def wait(*args, **kwargs):
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    if frame:
        waits.add(frame.f_lineno)
    return watched(*args, **kwargs)
world.watch.wait = wait
"""
WAITED = """world.watch.wait = watched
lines = [linecache.getline(__file__, number).strip() for number in sorted(waits)]
open(f"{cfg.output_dir}/waits_{world.rank}", "w").write(json.dumps(lines))
"""
"""To be put before all parts are made, and after the loop: each rank writes down the lines of
train.py in which it waited for other ranks."""

FORGET = """import sys
for name in [name for name in sys.modules if name.startswith("spmdrl")]:
    del sys.modules[name]
"""
"""To be put first: ranks are forks that have imported all of spmdrl already."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("edits")
    create_model(where / "start", hidden_size=64, layers=2, heads=2, kv_heads=1)
    (where / "r.py").write_text(REWARDS)
    return where


def edit(number: int) -> tuple[str, str]:
    """Return the line that an edit of the page is about, and what it becomes or is followed by."""
    page = (ROOT / "docs/editing.md").read_text()
    part = page[page.index(f"**{number}. ") :].partition("\n**")[0]
    line, others = re.findall(r"(?:^    .+\n)+", part, re.M)[:2]
    line, others = textwrap.dedent(line), textwrap.dedent(others)
    return line.strip(), others if "\nbecomes\n" in part else line + others


def run_edited(folder: Path, name: str, edits: dict[str, str], *, status: int = 0, **flags) -> str:
    """Run a copy of train.py in which each line became others; return what it printed."""
    text = (ROOT / "train.py").read_text()
    for line, others in edits.items():
        assert text.count(line) == 1, line
        before = text[: text.index(line)].rpartition("\n")[2]
        text = text.replace(line, others.strip().replace("\n", f"\n{before}"))
    script, out = folder / f"{name}.py", folder / name
    script.write_text(text)
    own = {
        "model.path": folder / "start",
        "output-dir": out,
        "engine.kind": "transformers",
        "sampling.max-response-tokens": 8,
        "rewards.functions": f"{folder / 'r.py'}:half",
        "algorithm.aggregation": "token_mean",
        "lag": 0,
        "steps": 2,
    }
    ran = run("demo_grpo.yaml", 2, script=script, status=status, **TINY["rl"] | own | flags)
    return ran.output


def rows_of(folder: Path, name: str, edits: dict[str, str], **flags) -> list[dict]:
    """Return the metrics of a copy of train.py in which each line became others."""
    run_edited(folder, name, edits, **flags)
    return metrics(folder / name)


def test_a_push_that_one_rank_leaves_out_is_named_by_what_waits_for_it(folder):
    push = "pushed = stream.push(version=step + 1)"
    edits = {push: f"{push} if world.rank == 0 else {{}}"}
    said = run_edited(folder, "left_out", edits, status=1, **{"layout.placement": "split"})
    at = r"\(\S+left_out.py:\d+, in train\)"
    places = [("await peers", 0), ("agree to stop", 1)]
    for wait, rank in places:
        assert re.search(rf"rank {rank} \(\S+\) at `{wait}` of step 1 {at}", said), said


@pytest.fixture(scope="module")
def plain(folder) -> list[dict]:
    """A metric of one's own, which changes nothing."""
    modules = f"""{FINISH}
ours = [name for name in sys.modules if name.startswith("spmdrl.")]
open(f"{{cfg.output_dir}}/modules_{{world.rank}}", "w").write(" ".join(ours))
"""
    edits = {TRAIN: f"{WATCHED}{TRAIN}", FINISH: f"{WAITED}{modules}"}
    edits["import signal"] = f"{FORGET}import signal"
    flags = {"evaluate.every-steps": 2, "data.eval-size": 4}
    return rows_of(folder, "metric", dict([edit(1)]) | edits, **flags)


def test_a_metric_of_ones_own_is_logged_at_every_step(plain):
    assert len(plain) == 2 and all(row["my/longest"] > 8 for row in plain)


def test_a_rank_that_does_not_train_loads_nothing_of_training(folder, plain):
    trainer, generator = ((folder / "metric" / f"modules_{r}").read_text() for r in (0, 1))
    assert "spmdrl.train.trainer" in trainer and "spmdrl.engine.transformers" in generator
    assert "spmdrl.train" not in generator


def marked(mark: str) -> set[str]:
    """Return the lines of train() and prove() with a mark, up to the end of the loop."""
    text = (ROOT / "train.py").read_text()
    text = text[text.index(TRAIN) : text.index(FINISH)] + text[text.index("def prove(") :]
    text = text.partition("\ndef main(")[0]
    found = {line.strip() for line in text.splitlines() if mark in MARK.findall(line)}
    # The waits of prove() are those of its own lines. The other two need nothing of this config.
    others = ("= prove(", "size_microbatches", "trainer.annotate")
    return {line for line in found if not any(other in line for other in others)}


def test_each_line_that_waits_has_the_mark_of_those_who_wait(folder, plain):
    trainer, engine = (
        {*json.loads((folder / "metric" / f"waits_{rank}").read_text())} for rank in (0, 1)
    )
    edited = {line for line in trainer | engine if "own=longest" in line}
    assert len(edited) == 1, "the edit of this run"
    on_trainers = {line for line in marked("trainers") if "report.step(" not in line} | edited
    assert engine == marked("all")
    assert trainer == marked("all") | on_trainers


def test_groups_that_are_solved_are_dropped(folder, plain):
    mine = '{"my/trained": (float(batch.scalars.is_valid.sum()), len(batch.scalars))}'
    line, _ = edit(1)
    own = line.replace("evaluated)", f"evaluated, own={mine})")
    edits = dict([edit(2)]) | {line: own}
    rows = rows_of(folder, "solved", edits)
    assert all(0 < row["my/trained"] < 1 for row in rows)
    assert rows[0]["reward/mean"] == plain[0]["reward/mean"], "of what was sampled"
    assert rows[0]["rollout/left_out_frac"] == pytest.approx(1 - rows[0]["my/trained"])
    # The same terms, of which a solved group has none, are divided by fewer tokens.
    assert rows[0]["policy/grad_norm"] > plain[0]["policy/grad_norm"] * 1.05


def test_an_advantage_has_a_second_term(folder, plain):
    rows = rows_of(folder, "term", dict([edit(3)]))
    assert rows[0]["reward/mean"] == plain[0]["reward/mean"]
    assert rows[0]["policy/grad_norm"] > 2 * plain[0]["policy/grad_norm"]


def test_steps_without_lag_and_overlapped_ones_take_turns(folder):
    rows = rows_of(folder, "turns", dict([edit(4)]), lag=1, steps=5)
    assert [row["policy/staleness"] for row in rows] == [0, 0, 1, 0, 1]


def test_a_loss_of_ones_own_reports_a_statistic_of_its_own(folder, plain):
    rows = rows_of(folder, "loss", dict([edit(5)]), **{"algorithm.loss-options": "{}"})
    assert [row["my/capped_frac"] for row in rows] == [0, 0]  # one update: the ratio is 1
    assert rows[0]["policy/grad_norm"] == pytest.approx(plain[0]["policy/grad_norm"], rel=1e-3)


def test_a_run_stops_at_a_reward_and_is_saved(folder):
    line, others = edit(6)
    assert others.count("0.9") == 1
    edits = {line: others.replace("0.9", "0.1")}
    said = run_edited(folder, "enough", edits, steps=5)
    assert len(metrics(folder / "enough")) == 1 and "stopped: reward/mean" in said
    assert (folder / "enough/checkpoints/step_1").is_dir()


def test_an_option_of_a_loss_changes_over_the_steps(folder):
    rows = rows_of(folder, "clip", dict([edit(7)]))
    assert [row["my/clip_high"] for row in rows] == pytest.approx([0.28, 0.28 * 0.995])


@pytest.mark.parametrize("wrong", [torch.ones(3).bool(), scalars().rewards, scalars().group_ids])
def test_a_mask_that_is_no_bool_for_each_sequence_is_refused(wrong):
    batch = Batch(scalars=scalars(), updates=(), update_ids=scalars().group_ids)
    assert not batch.without(scalars().rewards > -9).scalars.is_valid.any()
    with pytest.raises(TypeError, match=r"batch.without: expected a bool for each of the batch's"):
        batch.without(wrong)
