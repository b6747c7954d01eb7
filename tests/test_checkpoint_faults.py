"""What a checkpoint refuses, survives and reports: damage, full disks, other configs."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_runs import SmallPolicy, SmallSource, config, start
from ranks import run_ranks

from spmdrl.checkpoint import Checkpointer
from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.restore import candidate_folders, config_differences
from spmdrl.config import (
    BatchSettings,
    CheckpointSettings,
    Config,
    OptimizerSettings,
    ReportSettings,
    flatten,
)
from spmdrl.world import World


class Lines(logging.Handler):
    """Collects what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("spmdrl").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# ------------------------------------------------------------------ damage


def truncate(folder: Path) -> str:
    path = next(folder.glob("policy/__0_*.distcp"))
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path} has "


def flip(folder: Path) -> str:
    path = next(folder.glob("policy/__0_*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path} does not match the manifest's sha256"


def drop_manifest(folder: Path) -> str:
    (folder / disk.NAME).unlink()
    return f"{folder / disk.NAME} is missing"


def change_manifest(folder: Path) -> str:
    path = folder / disk.NAME
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    return f"{path} does not match its own sha256"


def cut_manifest(folder: Path) -> str:
    path = folder / disk.NAME
    path.write_text(path.read_text()[:200])
    return f"{path} is not a manifest"


def drop_file(folder: Path) -> str:
    (folder / "rng_0.pt").unlink()
    return f"{folder / 'rng_0.pt'} is missing"


DAMAGES = (truncate, flip, drop_manifest, change_manifest, cut_manifest, drop_file)


def _damaged(cfg: Config) -> list[str]:
    world, policy, source, checkpointer = start(cfg)
    digests = []
    for step in (1, 2, 3):
        policy.update()
        checkpointer.maybe_save(step, policy, source)
        digests.append(policy.digest())
    checkpointer.finish()
    for damage in DAMAGES:
        _check_damage(damage, world, policy, source, second=digests[1])
    return _refused(world, policy, source)


def _check_damage(
    damage: Callable, world: World, policy: SmallPolicy, source: SmallSource, *, second: str
) -> None:
    copy = Path(world.cfg.output_dir) / damage.__name__
    shutil.copytree(disk.checkpoints_folder(world.cfg.output_dir), copy / "checkpoints")
    expected, log = damage(copy / "checkpoints/step_3"), Lines()
    cfg = dataclasses.replace(world.cfg, output_dir=str(copy))
    state = Checkpointer(cfg, world).restore(policy, source)
    assert state.step == 2 and policy.digest() == second, damage.__name__
    assert any(expected in line for line in log.lines), (expected, log.lines)
    left = sorted(p.name for p in (copy / "checkpoints").iterdir())
    assert left == ["step_2", "step_3.damaged"], damage.__name__
    # The name is free again, and the next save takes it.
    again = Checkpointer(cfg, world)
    again.maybe_save(3, policy, source)
    again.finish()
    assert (copy / "checkpoints/step_3/manifest.json").is_file()


def _refused(world: World, policy: SmallPolicy, source: SmallSource) -> list[str]:
    """Damage all that is left, and return what restoring says."""
    messages = []
    for folder in disk.complete_checkpoints(disk.checkpoints_folder(world.cfg.output_dir)):
        flip(folder)
    for cfg in (
        world.cfg,
        dataclasses.replace(
            world.cfg,
            checkpoint=CheckpointSettings(resume=f"{world.cfg.output_dir}/checkpoints/step_3"),
        ),
    ):
        with pytest.raises(ValueError) as caught:
            Checkpointer(cfg, world).restore(policy, source)
        messages.append(str(caught.value))
    return messages


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path):
    (messages,) = run_ranks(1, _damaged, config(tmp_path))
    assert "step_3" in messages[0] and "step_2" in messages[0] and "no checkpoint" in messages[0]
    assert "step_3" in messages[1] and "step_2" not in messages[1]
    # A refusal touches nothing.
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step_2", "step_3"}


def test_an_index_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "made"),)

    for value in (Evil(), {"plain": 1}):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(ValueError, match="index of tensors"):
            disk.TensorReader(tmp_path).read_metadata()
    assert not (tmp_path / "made").exists()


# ------------------------------------------------------------------ another config or model


def _resumed(cfg: Config) -> list[str]:
    world, policy, source, checkpointer = start(cfg)
    checkpointer.maybe_save(1, policy, source, stop=True)

    def resume(changed: Config, policy: SmallPolicy) -> str:
        try:
            return f"step {Checkpointer(changed, world).restore(policy, source).step}"
        except ValueError as error:
            return str(error)

    changed = dataclasses.replace(cfg, seed=7, optimizer=OptimizerSettings(beta1=0.5))
    allowed = dataclasses.replace(changed, checkpoint=CheckpointSettings(allow_config_change=True))
    other_model = SmallPolicy(world, width=16)
    return [resume(changed, policy), resume(allowed, policy), resume(cfg, other_model)]


def test_another_config_or_model_is_refused_on_all_ranks_with_the_difference(tmp_path):
    results = run_ranks(3, _resumed, config(tmp_path, world_size=3, trainers=2))
    assert results[0] == results[1] == results[2]
    refused, allowed, other_model = results[0]
    assert "seed: 0 in the checkpoint, 7 now" in refused
    assert "optimizer.beta1: 0.9 in the checkpoint, 0.5 now" in refused
    assert "allow-config-change" in refused
    assert allowed == "step 1"
    assert "model.0.weight has shape (6, 12) there, (6, 16) here" in other_model


def test_fields_that_do_not_shape_the_result_may_change():
    old, base = flatten(Config()), Config()
    free = dataclasses.replace(
        base,
        output_dir="elsewhere",
        steps=7,
        checkpoint=CheckpointSettings(every_steps=3),
        report=ReportSettings(tracker="none"),
        batch=BatchSettings(tokens_per_microbatch=99),
        layout=dataclasses.replace(base.layout, world_size=8, tp=2),
    )
    assert config_differences(old, free) == []
    cosine = dataclasses.replace(base, steps=7, optimizer=OptimizerSettings(schedule="cosine"))
    found = config_differences(flatten(dataclasses.replace(cosine, steps=100)), cosine)
    assert found == ["steps: 100 in the checkpoint, 7 now"], "the schedule depends on the steps"


def test_fields_that_came_or_went_since_the_checkpoint_are_compared_with_defaults():
    old = flatten(Config())
    del old["seed"]
    assert config_differences(old, Config()) == []
    assert config_differences(old, Config(seed=1)) == ["seed: 0 in the checkpoint, 1 now"]
    assert config_differences(old | {"gone": 3}, Config()) == [
        "gone: 3 in the checkpoint, 'unknown' now"
    ]


# ------------------------------------------------------------------ resume modes


def make(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    disk.write_manifest(
        folder,
        disk.Manifest(step=step, config={}, model="m", tokenizer="m", rollout_ranks=(), files={}),
    )
    return folder


def test_resume_modes_choose_and_refuse(tmp_path):
    def ask(resume: str) -> tuple[list[Path], str]:
        return candidate_folders(config(tmp_path / "run", resume=resume))

    assert ask("auto") == ask("never") == ([], "")
    root = tmp_path / "run/checkpoints"
    nine, ten = make(root / "step_9", 9), make(root / "step_10", 10)
    make(root / "step_11.partial", 11)
    make(root / "step_12.damaged", 12)
    assert ask("auto") == ([ten, nine], "")
    assert "step_10 exists" in ask("never")[1]
    assert ask(str(ten)) == ([ten], "")
    assert "mix two histories" in ask(str(nine))[1]
    foreign = make(tmp_path / "other/checkpoints/step_30", 30)
    assert ask(str(foreign)) == ([foreign], "")
    assert "did you mean" in ask(str(tmp_path / "other"))[1]
    assert "step_30" in ask(str(tmp_path / "other"))[1]
    assert "not a complete checkpoint" in ask(str(tmp_path / "nowhere"))[1]


# ------------------------------------------------------------------ full disk


def _fills(cfg: Config, limit_bytes: int) -> tuple[list[str], str]:
    world, policy, source, checkpointer = start(cfg)
    policy = SmallPolicy(world, width=20_000)  # 240 k elements: 2.9 MB with optimizer state
    policy.update()
    log = Lines()
    if limit_bytes and world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    checkpointer.maybe_save(4, policy, source)
    policy.update()
    while checkpointer._pending is not None:
        checkpointer.maybe_save(5, policy, source)
    root = Path(cfg.output_dir) / "checkpoints"
    assert (root / "step_0" / disk.NAME).is_file(), "an older checkpoint was touched"
    # Rank 0 removes what was half-written; its peers do not wait for that.
    assert world.rank or [p.name for p in root.iterdir()] == ["step_0"]
    with pytest.raises(RuntimeError) as caught:
        checkpointer.maybe_save(6, policy, source, stop=True)
    assert world.rank or [p.name for p in root.iterdir()] == ["step_0"]
    return log.lines, str(caught.value)


def _check_full(results: list[tuple[list[str], str]], reason: str) -> None:
    (line,) = results[0][0]
    assert reason in line and "step 4" in line and "training goes on" in line
    assert all(reason in final and "step_0" in final for _, final in results), results


@pytest.fixture
def full_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(full_disk):
    make(full_disk / "checkpoints/step_0", 0)
    cfg = config(full_disk, world_size=2, every=4)
    _check_full(run_ranks(2, _fills, cfg, 0), "No space left on device")


def test_a_write_error_of_one_rank_is_agreed_on_by_all(tmp_path):
    make(tmp_path / "checkpoints/step_0", 0)
    cfg = config(tmp_path, world_size=2, every=4)
    _check_full(run_ranks(2, _fills, cfg, 100_000), "File too large")
