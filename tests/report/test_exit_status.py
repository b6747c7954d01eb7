"""What a run says, and ends with, that took no update."""

from __future__ import annotations

import json

import pytest

from spmdrl.report.exit_status import NOTHING_LEARNT, exit_status, nothing_learnt
from tests.helpers.report_world import SmallWorld, config, group  # noqa: F401
from tests.program.test_train_edits import edit, folder, run_edited  # noqa: F401

TRAINED = {"policy/grad_norm": 0.1, "policy/skipped_updates": 0.0}
SKIPPED = {"policy/skipped_updates": 2.0}
FLAT = TRAINED | {"policy/grad_norm": 0.0}
LEFT_OUT = FLAT | {"rollout/samples": 32.0, "rollout/left_out_frac": 1.0}
HALF = LEFT_OUT | {"rollout/left_out_frac": 0.5, "rollout/failed_rewards": 16.0}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([SKIPPED, SKIPPED], ["in 2 steps: 4 updates were skipped", "not finite"]),
        ([LEFT_OUT, SKIPPED], ["2 updates were", "in 1 steps no sample was in the loss: 32 were"]),
        ([HALF], ["16 were left out by an edit of the loop", "and 16 rewards failed"]),
        ([{"eval/reward": 1.0}, LEFT_OUT], ["in 1 steps", "batch.without"]),
        ([FLAT, SKIPPED], ["in 2 steps", "in 1 steps the gradient was 0"]),
    ],
)
def test_a_run_that_learns_nothing_says_why(rows, words):
    assert all(word in nothing_learnt(rows) for word in words), nothing_learnt(rows)


@pytest.mark.parametrize("rows", [[], [{"value/loss": 1.0}], [SKIPPED, TRAINED], [TRAINED]])
def test_a_run_that_took_an_update_or_had_none_to_take_says_nothing(rows):
    assert nothing_learnt(rows) == ""


def test_a_run_whose_gradients_were_0_is_told_and_has_not_failed(tmp_path, group, caplog):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0} | FLAT) + "\n")
    assert exit_status(config(tmp_path), SmallWorld(config(tmp_path), group)) == 0
    assert "nothing was learnt in 1 steps: in 1 steps the gradient was 0" in caplog.text


def test_a_run_that_is_stopped_goes_on_and_a_whole_one_failed(tmp_path, group, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0} | SKIPPED) + "\n")
    monkeypatch.setenv("SPMDRL_REFUSED", str(tmp_path / "refused"))
    cfg = config(tmp_path)
    world = SmallWorld(cfg, group)
    assert exit_status(cfg, world, is_whole=False) == 0 and not (tmp_path / "refused").exists()
    assert exit_status(cfg, world) == NOTHING_LEARNT
    assert "nothing was learnt" in (tmp_path / "refused").read_text()


def test_a_run_whose_samples_are_all_left_out_fails_and_can_go_on(folder):
    line, _ = edit(2)
    name, edits = "left_out_all", {line: f"{line}\nbatch = batch.without(batch.scalars.is_valid)"}
    said = run_edited(folder, name, edits, status=NOTHING_LEARNT)
    assert "nothing was learnt in 2 steps: in 2 steps no sample was in the loss: 64 were" in said
    again = run_edited(folder, name, edits, status=NOTHING_LEARNT)
    assert "already finished" in again and "nothing was learnt" in again
    more = {"steps": 3, "checkpoint.allow-config-change": True}
    run_edited(folder, name, {line: line + "\n"}, **more)
