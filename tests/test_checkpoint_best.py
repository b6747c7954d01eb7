"""The best checkpoint: found at an evaluation, kept beside the last, whatever ends the job."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from checkpoint_runs import config, restored, save_steps, start
from ranks import run_ranks

from spmdrl import config as configs
from spmdrl.check.settings import validate
from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.keep import named
from spmdrl.config import (
    CheckpointSettings,
    Config,
    DataSettings,
    EvaluateSettings,
    KeepSettings,
    ModelSettings,
)

BEST = KeepSettings(last=1, best="eval/reward")


def names(output_dir: Path) -> list[str]:
    return sorted(p.name for p in disk.checkpoints_folder(output_dir).iterdir())


def best(output_dir: Path) -> str:
    return os.readlink(output_dir / "checkpoints" / "best")


@pytest.mark.parametrize(("mode", "stays"), [("max", "step_3"), ("min", "step_2")])
def test_the_best_stays_beside_the_last_and_equal_ones_are_not_better(tmp_path, mode, stays):
    rewards = {2: 0.5, 3: 0.9, 5: 0.7, 7: float("nan"), 8: 0.9 if mode == "max" else 0.5}
    cfg = config(tmp_path, every=4, steps=8, keep=dataclasses.replace(BEST, mode=mode))
    (digests,) = run_ranks(1, save_steps, cfg, 8, rewards)
    assert names(tmp_path) == ["best", stays, "step_8"] and best(tmp_path) == stays
    assert named(tmp_path, "best") == (tmp_path / "checkpoints" / stays).resolve()
    assert disk.read_manifest(named(tmp_path, "best")).evaluated == {
        "eval/reward": rewards[int(stays[-1])]
    }
    # Another run goes on from it by its name; the same run would mix two histories.
    there = str(tmp_path / "checkpoints" / "best")
    other = run_ranks(1, restored, config(tmp_path / "other", resume=there))
    assert other[0][0] == int(stays[-1]) and other[0][2] == digests[int(stays[-1]) - 1]
    with pytest.raises(AssertionError, match="mix two histories"):
        run_ranks(1, restored, config(tmp_path, resume=there))


def _goes_on(cfg: Config, rewards: dict[int, float]) -> list[str]:
    """Resume, then offer evaluations; return what best names after each."""
    world, policy, source, checkpointer = start(cfg)
    checkpointer.restore(policy, source)
    found = []
    for step, value in rewards.items():
        checkpointer.maybe_save(step, policy, source, evaluated={"eval/reward": (value, 1)})
        checkpointer.finish()
        found.append(best(Path(cfg.output_dir)))
    world.close()
    return found


def test_a_resumed_run_knows_the_best_and_finds_new_ones_between_the_due_steps(tmp_path):
    cfg = config(tmp_path, world_size=2, every=0, keep=BEST)
    run_ranks(2, save_steps, cfg, 4, {1: 0.2, 2: 0.6, 3: 0.4})
    assert names(tmp_path) == ["best", "step_2"]
    for found in run_ranks(2, _goes_on, cfg, {5: 0.5, 6: 0.8, 7: 0.7}):
        assert found == ["step_2", "step_6", "step_6"]
    # Under another metric mode the checkpoints that are there are compared anew.
    changed = dataclasses.replace(cfg.checkpoint, keep=dataclasses.replace(BEST, mode="min"))
    shutil.copytree(tmp_path / "checkpoints/step_6", tmp_path / "checkpoints/step_9")
    manifest = disk.read_manifest(tmp_path / "checkpoints/step_9")
    disk.write_manifest(
        tmp_path / "checkpoints/step_9",
        dataclasses.replace(manifest, step=9, evaluated={"eval/reward": 0.1}),
    )
    run_ranks(2, restored, dataclasses.replace(cfg, checkpoint=changed))
    assert best(tmp_path) == "step_9"


def _dies(cfg: Config, function: str) -> None:
    """Save a best and be killed at the first call of `function` in saving a better one."""
    _world, policy, source, checkpointer = start(cfg)
    checkpointer.maybe_save(1, policy, source, evaluated={"eval/reward": (0.5, 1)})
    checkpointer.finish()
    owner = {"replace": os, "rename": os, "rmtree": shutil, "write_manifest": disk}[function]
    before = getattr(owner, function)

    def die(*args: object, **options: object) -> None:
        if function != "rmtree" or Path(str(args[0])).name == "step_1.partial":
            os.kill(os.getpid(), signal.SIGKILL)
        before(*args, **options)

    setattr(owner, function, die)
    checkpointer.maybe_save(2, policy, source, evaluated={"eval/reward": (0.7, 1)})
    checkpointer.finish()


@pytest.mark.parametrize(
    ("function", "whole"),
    [
        ("write_manifest", "step_1"),
        ("rename", "step_1"),
        ("replace", "step_2"),
        ("rmtree", "step_2"),
    ],
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_best(tmp_path, function, whole):
    cfg = config(tmp_path, keep=BEST)
    with pytest.raises(AssertionError, match="died without a result"):
        run_ranks(1, _dies, cfg, function)
    assert (tmp_path / "checkpoints" / "best" / disk.NAME).is_file(), "best names what is gone"
    assert run_ranks(1, restored, cfg)[0][:2] == (int(whole[-1]), whole)
    assert best(tmp_path) == whole and "step_2.partial" not in names(tmp_path)


def test_a_damaged_best_gives_its_name_to_the_next(tmp_path):
    cfg = config(tmp_path, keep=KeepSettings(last=3, best="eval/reward"))
    run_ranks(1, save_steps, cfg, 3, {1: 0.2, 2: 0.6, 3: 0.8})
    file = next((tmp_path / "checkpoints/step_3/policy").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert run_ranks(1, restored, cfg)[0][0] == 2
    assert best(tmp_path) == "step_2"


# ------------------------------------------------------------------ refusals


def problems(keep: dict, **evaluate) -> str:
    return "; ".join(
        validate(
            Config(
                model=ModelSettings(path="m"),
                data=DataSettings(train="task:addition", size=10, eval="task:addition"),
                checkpoint=CheckpointSettings(keep=KeepSettings(**keep)),
                evaluate=EvaluateSettings(**evaluate),
            )
        )
    )


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
        ({"mode": "min"}, "without best"),
    ):
        assert says in problems(keep, every_steps=3, samples=4), (keep, says)
    assert "evaluate.every_steps is 0" in problems({"best": "eval/reward"})
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


def _checks(cfg: Config) -> str:
    world, _, _, checkpointer = start(cfg)
    checkpointer.check({})
    checkpointer.check({"eval/maj_at_4": (1, 1)})
    try:
        checkpointer.check({"eval/math/reward": (1, 1), "eval/reward": (1, 1)})
    except ValueError as error:
        return json.dumps(str(error))
    finally:
        world.close()
    return ""


def test_a_metric_that_the_first_evaluation_lacks_is_refused(tmp_path):
    (said,) = run_ranks(1, _checks, config(tmp_path, keep=KeepSettings(best="eval/maj_at_4")))
    assert "checkpoint.keep.best: the evaluation gives no eval/maj_at_4" in said
