"""The best checkpoint: found at an evaluation, kept beside the last, whatever ends the job."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from spmdrl import config as configs
from spmdrl.check.settings import validate
from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.keep import named
from spmdrl.config import Config, KeepSettings
from spmdrl.same_run.data_files import data_digests
from tests.checkpoint.test_checkpoint import names
from tests.helpers.checkpoint_runs import Job, config, dies, on_ranks, restored, save_steps
from tests.helpers.policy_runs import VALID, changed

BEST = KeepSettings(last=1, best="eval/reward")


def best(output_dir: Path) -> str:
    return os.readlink(output_dir / "checkpoints" / "best")


@pytest.mark.parametrize(
    ("mode", "stays"), [("max", "step_3"), pytest.param("min", "step_2", marks=pytest.mark.kill)]
)
def test_the_best_stays_beside_the_last_and_equal_ones_are_not_better(tmp_path, mode, stays):
    rewards = {2: 0.5, 3: 0.9, 5: 0.7, 7: float("nan"), 8: 0.9 if mode == "max" else 0.5}
    cfg = config(tmp_path, every=4, steps=8, keep=dataclasses.replace(BEST, mode=mode))
    (digests,) = save_steps(cfg, 8, rewards)
    assert names(tmp_path) == ["best", stays, "step_8"] and best(tmp_path) == stays
    assert named(tmp_path, "best") == (tmp_path / "checkpoints" / stays).resolve()
    assert disk.read_manifest(named(tmp_path, "best")).evaluated == {
        "eval/reward": rewards[int(stays[-1])]
    }
    # Another run goes on from it by its name; the same run would mix two histories.
    there = str(tmp_path / "checkpoints" / "best")
    other = restored(config(tmp_path / "other", resume=there))
    assert other[0][0] == int(stays[-1]) and other[0][2] == digests[int(stays[-1]) - 1]
    with pytest.raises(AssertionError, match="mix two histories"):
        restored(config(tmp_path, resume=there))


def _goes_on(job: Job, rewards: dict[int, float]) -> list[str]:
    """Resume, then offer evaluations; return what best names after each."""
    world, policy, source, checkpointer = job
    checkpointer.restore(policy, source)
    found = []
    for step, value in rewards.items():
        checkpointer.maybe_save(step, policy, source, evaluated={"eval/reward": (value, 1)})
        checkpointer.finish()
        found.append(best(Path(world.cfg.output_dir)))
    return found


def test_a_resumed_run_knows_the_best_and_finds_new_ones_between_the_due_steps(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    cfg = changed(config(tmp_path, world_size=2, every=0, keep=BEST), data={"train": str(rows)})
    save_steps(cfg, 4, {1: 0.2, 2: 0.6, 3: 0.4})
    assert disk.read_manifest(named(tmp_path, "best")).data == data_digests(cfg) != {}
    assert names(tmp_path) == ["best", "step_2"]
    for found in on_ranks(cfg, _goes_on, {5: 0.5, 6: 0.8, 7: 0.7}):
        assert found == ["step_2", "step_6", "step_6"]
    # Under another metric mode the checkpoints that are there are compared anew.
    shutil.copytree(tmp_path / "checkpoints/step_6", tmp_path / "checkpoints/step_9")
    manifest = disk.read_manifest(tmp_path / "checkpoints/step_6")
    disk.write_manifest(
        tmp_path / "checkpoints/step_9",
        dataclasses.replace(manifest, step=9, evaluated={"eval/reward": 0.1}),
    )
    restored(changed(cfg, checkpoint={"keep": {"mode": "min"}}))
    assert best(tmp_path) == "step_9"


@pytest.mark.parametrize(
    ("point", "whole"),
    [("manifest", "step_1"), ("complete", "step_1"), ("best", "step_2"), ("removal", "step_2")],
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_best(tmp_path, point, whole):
    cfg = config(tmp_path, keep=BEST)
    with pytest.raises(AssertionError, match="died without a result"):
        on_ranks(cfg, dies, point)
    assert (tmp_path / "checkpoints" / "best" / disk.NAME).is_file(), "best names what is gone"
    assert restored(cfg)[0][:2] == (int(whole[-1]), whole)
    assert best(tmp_path) == whole and "step_2.partial" not in names(tmp_path)


def test_a_damaged_best_gives_its_name_to_the_next(tmp_path):
    cfg = config(tmp_path, keep=KeepSettings(last=3, best="eval/reward"))
    save_steps(cfg, 3, {1: 0.2, 2: 0.6, 3: 0.8})
    file = next((tmp_path / "checkpoints/step_3/policy").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert restored(cfg)[0][0] == 2
    assert best(tmp_path) == "step_2"


# ------------------------------------------------------------------ refusals


def problems(keep: dict, **evaluate) -> str:
    cfg = changed(
        VALID, data={"eval": "task:addition"}, checkpoint={"keep": keep}, evaluate=evaluate
    )
    return "; ".join(validate(cfg))


def test_what_cannot_be_kept_is_refused_with_the_nearest_name(tmp_path):
    assert not problems({"last": 1}) and Config().checkpoint.keep.last == 2
    for name in ("eval/reward", "eval/pass_at_4", "eval/maj_at_4", "eval/grade/mean"):
        assert not problems({"best": name, "mode": "min"}, every_steps=3, samples=4)
    for keep, says in (
        ({"best": "eval/rewrd"}, "did you mean eval/reward?"),
        (
            {"best": "eval/pass_at_3"},
            "not measured with evaluate.samples 4; did you mean eval/pass_at_4?",
        ),
        ({"best": "reward/mean"}, "expected a metric of the evaluation"),
        ({"last": 0}, "keep.last: must be at least 1, got 0"),
        ({"mode": "min"}, "checkpoint.keep.mode: min with checkpoint.keep.best empty"),
    ):
        assert says in problems(keep, every_steps=3, samples=4), (keep, says)
    assert "with evaluate.every_steps 0; nothing measures it" in problems({"best": "eval/reward"})
    for text, says in (
        ("keep_last: 2", "keep_last: unknown key; did you mean keep?"),
        ("keep: {bst: eval/reward}", "keep.bst: unknown key; did you mean best?"),
        ("keep: {last: true}", "keep.last: expected int, got True"),
        ("keep: {mode: top}", "keep.mode: 'top' is not one of max, min"),
    ):
        (tmp_path / "c.yaml").write_text(f"checkpoint: {{{text}}}")
        with pytest.raises(ValueError, match=says):
            configs.load_yaml(tmp_path / "c.yaml")
    with pytest.raises(ValueError, match="kept none by a metric"):
        named(tmp_path, "best")


def _checks(job: Job) -> str:
    checkpointer = job[-1]
    checkpointer.check({})
    checkpointer.check({"eval/maj_at_4": (1, 1)})
    with pytest.raises(ValueError) as refused:
        checkpointer.check({"eval/math/reward": (1, 1), "eval/reward": (1, 1)})
    return str(refused.value)


def test_a_metric_that_the_first_evaluation_lacks_is_refused(tmp_path):
    (said,) = on_ranks(config(tmp_path, keep=KeepSettings(best="eval/maj_at_4")), _checks)
    assert "checkpoint.keep.best: the evaluation gives no eval/maj_at_4" in said
