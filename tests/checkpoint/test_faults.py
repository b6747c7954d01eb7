"""What a checkpoint refuses, survives and reports: damage, full disks, other configs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from spmdrl.checkpoint import Checkpointer, keep
from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.restore import (
    MAY_CHANGE,
    _tidy,
    candidate_folders,
    config_differences,
    resume_problems,
)
from spmdrl.config import Config, DataSettings, SourceSettings, flatten
from spmdrl.errors import RunFailed
from spmdrl.imports import attempt
from spmdrl.same_run import data_files
from spmdrl.same_run.data_files import data_digests
from spmdrl.same_run.differences import config_of
from spmdrl.world.world import World
from tests.helpers.built import refused
from tests.helpers.checkpoint_runs import Job, SmallPolicy, SmallSource, config, on_ranks
from tests.helpers.policy_runs import changed
from tests.helpers.worlds import Said

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


def copy_another(folder: Path) -> str:
    """Another step's checkpoint under this one's name."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_2"), folder)
    return f"{folder / disk.NAME} is of step 2, and its folder is called step_3"


def drop_key(folder: Path) -> str:
    sign(folder, lambda body: body.pop("rollout_ranks"))
    return f"{folder / disk.NAME} is not a manifest of this version: has no rollout_ranks"


def fail_to_read(folder: Path) -> str:
    """A disk that fails while files are compared, as it does once."""
    fail_once(disk, "file_entry", folder / "rng_0.pt")
    return f"{folder / 'rng_0.pt'} cannot be read: [Errno 5]"


def fail_to_load(folder: Path) -> str:
    fail_once(disk, "load_plain", folder / "rng_0.pt")
    return "cannot be read: [Errno 5]"


def fail_once(module: Any, name: str, place: Path) -> None:
    """Have a function raise once, as of a disk that cannot be read, where it comes to `place`."""
    real = getattr(module, name)

    def failing(path: Path) -> Any:
        if path != place:
            return real(path)
        setattr(module, name, real)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    setattr(module, name, failing)


def sign(folder: Path, change: Callable[[dict], Any]) -> None:
    """Change a manifest and give it the digest of what it says now."""
    body = json.loads((folder / disk.NAME).read_text())
    change(body)
    body["sha256"] = disk._digest({k: v for k, v in body.items() if k != "sha256"})
    (folder / disk.NAME).write_text(json.dumps(body))


DAMAGES = (
    truncate,
    flip,
    drop_manifest,
    change_manifest,
    cut_manifest,
    drop_file,
    copy_another,
    drop_key,
    fail_to_read,
    fail_to_load,
)


def _damaged(job: Job) -> list[str]:
    world, policy, source, checkpointer = job
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
    expected, log = damage(copy / "checkpoints/step_3"), Said(logging.WARNING)
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
    named = {"resume": f"{world.cfg.output_dir}/checkpoints/step_3"}
    for cfg in (world.cfg, changed(world.cfg, checkpoint=named)):
        with pytest.raises(ValueError) as caught:
            Checkpointer(cfg, world).restore(policy, source)
        messages.append(str(caught.value))
    return messages


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path):
    (messages,) = on_ranks(config(tmp_path), _damaged)
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


def _resumed(job: Job) -> list[str]:
    world, policy, source, checkpointer = job
    checkpointer.maybe_save(1, policy, source, stop=True)
    other = changed(world.cfg, seed=7, optimizer={"beta1": 0.5})
    allowed = changed(other, checkpoint={"allow_config_change": True})
    assert Checkpointer(allowed, world).restore(policy, source).step == 1
    messages = []
    for cfg, own in ((other, policy), (world.cfg, SmallPolicy(world, width=16))):
        with pytest.raises(ValueError) as refused:
            Checkpointer(cfg, world).restore(own, source)
        messages.append(str(refused.value))
    return messages


def test_another_config_or_model_is_refused_on_all_ranks_with_the_difference(tmp_path):
    results = on_ranks(config(tmp_path, world_size=3, trainers=2), _resumed)
    assert results[0] == results[1] == results[2]
    refused, other_model = results[0]
    assert "seed: 0 there, 7 now" in refused
    assert "optimizer.beta1: 0.9 there, 0.5 now" in refused
    assert "allow-config-change" in refused
    assert "These may change freely: output_dir, steps, dry_run, layout.*, stream.*" in refused
    assert "model.0.weight has shape (6, 12) there, (6, 16) here" in other_model


def test_fields_that_do_not_shape_the_result_may_change():
    old, base = config_of(Config()), Config()
    free = changed(
        base,
        output_dir="elsewhere",
        steps=7,
        checkpoint={"every_steps": 3},
        report={"trackers": []},
        batch={"tokens_per_microbatch": 99},
        layout={"world_size": 8, "tp": 2},
    )
    assert config_differences(old, free) == []
    cosine = changed(base, steps=7, optimizer={"schedule": "cosine"})
    found = config_differences(config_of(changed(cosine, steps=100)), cosine)
    assert [*map(str, found)] == ["steps: 100 there, 7 now"], "the schedule depends on the steps"


def test_the_page_lists_the_fields_that_may_change():
    page = (Path(__file__).parents[2] / "docs/runs.md").read_text()
    section = page.split("## What may I change when I resume?")[1]
    table = section.partition("\nAll other settings")[0]
    listed = set(re.findall(r"`([\w.]+)(?:\*)?`", table.replace("`constant`", "")))
    listed.discard("optimizer.schedule")
    assert listed == set(MAY_CHANGE)
    fields = flatten(Config())
    for name in MAY_CHANGE:
        is_section = name.endswith(".")
        assert any(own.startswith(name) if is_section else own == name for own in fields), name


def test_fields_that_came_or_went_since_the_checkpoint_are_compared_with_defaults():
    old = config_of(Config())
    del old["seed"]
    assert config_differences(old, Config()) == []
    (seed,) = config_differences(old, Config(seed=1))
    assert str(seed) == "seed: 0 there, 1 now"
    (gone,) = config_differences(old | {"gone": 3}, Config())
    assert str(gone) == "gone: 3 there, 'none' now"


# ------------------------------------------------------------------ what is in a folder


def whole(folder: Path) -> Path:
    """Make a checkpoint of small files, whole by its manifest."""
    (folder / disk.POLICY).mkdir(parents=True)
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    torch.save(state, folder / "rng_0.pt")
    torch.save({"next": 3, "waiting": [{"tokens": torch.arange(9)}]}, folder / "rollouts_0.pt")
    index = torch.distributed.checkpoint.metadata.Metadata({}, planner_data={}, storage_data={})
    (folder / disk.POLICY / ".metadata").write_bytes(pickle.dumps(index))
    files = ("rng_0.pt", "rollouts_0.pt", f"{disk.POLICY}/.metadata")
    content = disk.Manifest(
        step=disk.step_of(folder),
        config={"seed": 1},
        model="m",
        tokenizer="m",
        rollout_ranks=(0,),
        files={name: disk.file_entry(folder / name) for name in files},
        evaluated={"eval/reward": 0.5},
    )
    disk.write_manifest(folder, content)
    return folder


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return bytes with one bit flipped, cut short, or with some of the middle left out."""
    kind, at = draw.randrange(8), draw.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + draw.randrange(1, 20) :]
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


@pytest.mark.filterwarnings("ignore:.*cannot be used")
def test_any_damage_to_any_file_has_the_one_before_taken(tmp_path):
    draw, root = random.Random(0), tmp_path / "checkpoints"
    older, newer = whole(root / "step_1"), whole(root / "step_2")
    right = disk.read_manifest(newer)
    for name in (disk.NAME, *right.files):
        data = (newer / name).read_bytes()
        for _ in range(100):
            changed_data = damaged(data, draw)
            (newer / name).write_bytes(changed_data)
            folder, content = disk.whole_checkpoint(tmp_path)
            # A blank of the manifest may become another: it says the same.
            assert folder == older or (content, name) == (right, disk.NAME)
            assert folder == older or changed_data != data
        (newer / name).unlink()
        assert disk.whole_checkpoint(tmp_path)[0] == older
        (newer / name).write_bytes(data)
    assert disk.whole_checkpoint(tmp_path)[0] == newer


def test_files_that_a_manifest_calls_whole_are_refused_by_name_or_read(tmp_path):
    """What somebody changed and signed anew."""
    draw, folder = random.Random(1), whole(tmp_path / "step_2")
    readers = {
        "rng_0.pt": disk.load_plain,
        "rollouts_0.pt": disk.load_plain,
        f"{disk.POLICY}/.metadata": lambda path: disk.TensorReader(path.parent).read_metadata(),
    }
    for name, read in readers.items():
        path = folder / name
        data = path.read_bytes()
        for _ in range(100):
            path.write_bytes(damaged(data, draw))
            _, error = attempt(lambda: read(path))
            assert error is None or str(path) in str(error)
        path.write_bytes(data)
    text = (folder / disk.NAME).read_text()
    may_lack = {"evaluated", "found_tokens", "data"}
    for key in json.loads(text):
        for change in (
            lambda body, key=key: body.pop(key),
            lambda body, key=key: body.update({key: ["odd"]}),
            lambda body, key=key: body.update({key: None}),
        ):
            (folder / disk.NAME).write_text(text)
            sign(folder, change)
            content, error = attempt(lambda: disk.read_manifest(folder))
            is_there = key in json.loads((folder / disk.NAME).read_text())
            if key in may_lack and not is_there:
                assert content is not None
            elif key != "sha256":
                assert str(folder / disk.NAME) in str(error), key
    for name in ("/etc/passwd", "../secret"):
        (folder / disk.NAME).write_text(text)
        sign(
            folder, lambda body, name=name: body["files"].update({name: {"size": 1, "sha256": ""}})
        )
        with refused(str(folder / disk.NAME), "outside of the folder"):
            disk.read_manifest(folder)


def test_links_and_folders_where_others_stand_block_no_resume(tmp_path):
    cfg = changed(config(tmp_path), checkpoint=dict(keep=dict(best="eval/reward")))
    root, outside = tmp_path / "checkpoints", tmp_path / "outside"
    newest = whole(root / "step_2")
    outside.mkdir()
    (outside / "mine").touch()
    for name in ("step_3.partial", "step_9.damaged", "best.partial"):
        (root / name).symlink_to(outside)
    shutil.copytree(newest, root / keep.BEST)  # by a copy that followed the link
    _tidy(cfg, {whole(root / "step_9"): "damaged"})
    assert os.readlink(root / keep.BEST) == "step_2"
    assert {path.name for path in root.iterdir()} == {
        *("step_2", "step_9.damaged", keep.BEST, f"{keep.BEST}.aside")
    }
    assert not (root / "step_9.damaged").is_symlink() and (outside / "mine").is_file()


def test_a_dry_run_refuses_the_checkpoints_that_the_run_refuses(tmp_path):
    cfg = changed(config(tmp_path), checkpoint=dict(allow_config_change=True))
    older = whole(tmp_path / "checkpoints" / "step_1")
    newer = whole(tmp_path / "checkpoints" / "step_2")
    assert resume_problems(cfg) == []
    os.truncate(newer / "rng_0.pt", 30 * 2**30)  # sparse: it takes no place
    named = changed(cfg, checkpoint=dict(resume=str(newer)))
    (problem,) = resume_problems(named)
    assert problem.startswith("no checkpoint can be used")
    assert f"{newer / 'rng_0.pt'} has {30 * 2**30} bytes, the manifest says" in problem
    assert resume_problems(cfg) == [], "the run takes the one before"
    (older / disk.NAME).unlink()
    assert f"{older / disk.NAME} is missing" in resume_problems(cfg)[0]


def test_a_dry_run_refuses_other_rows_than_those_of_the_checkpoint(tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    sources = (SourceSettings("task:addition", size=9), SourceSettings(str(rows)))
    cfg = changed(config(tmp_path), data={"train": sources})
    folder = whole(tmp_path / "checkpoints" / "step_1")
    own = {"config": config_of(cfg), "data": data_digests(cfg)}
    sign(folder, lambda body: body.update(own))
    assert own["data"].keys() == {"data.train[1]"} and resume_problems(cfg) == []
    rows.write_text('{"prompt": "1+2="}\n')  # as many rows, as many bytes
    (problem,) = resume_problems(cfg)
    assert problem.startswith("content of data.train[1]: ") and str(folder) in problem
    assert "--checkpoint.allow-config-change" in problem and not caplog.messages
    assert resume_problems(changed(cfg, checkpoint=dict(allow_config_change=True))) == []
    assert "content of data.train[1]" in caplog.text


def test_a_file_is_read_once_until_it_changes(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"x" * 9)
    cfg = Config(data=DataSettings(train=str(rows)))
    opened: list[Path] = []
    read = Path.open
    monkeypatch.setattr(Path, "open", lambda file, *how: opened.append(file) or read(file, *how))
    first = data_digests(cfg)
    assert data_digests(cfg) == first and opened == [rows]
    os.utime(rows, ns=(1, 1))
    assert data_digests(cfg) == first and opened == [rows, rows]


def test_of_a_large_file_parts_up_to_its_end_are_compared(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"x" * 5 * 2**20)
    cfg = Config(data=DataSettings(train=str(rows)))
    monkeypatch.setattr(data_files, "_MOST_PARTS", 5)
    every = data_digests(cfg)
    monkeypatch.setattr(data_files, "_MOST_PARTS", 4)
    data_files._digest_of.cache_clear()
    some = data_digests(cfg)
    for at in (0, 5 * 2**20 - 1):
        with rows.open("rb+") as file:
            file.seek(at)
            file.write(b"y")
        assert data_digests(cfg) != some != every
        rows.write_bytes(b"x" * 5 * 2**20)
    rows.write_bytes(b"x" * (5 * 2**20 + 1))
    assert data_digests(cfg) != some


def test_a_dry_run_refuses_an_index_of_tensors_that_names_more_than_is_there(tmp_path):
    cfg = changed(config(tmp_path), checkpoint=dict(allow_config_change=True))
    folder = whole(tmp_path / "checkpoints" / "step_1")
    index = folder / disk.POLICY / ".metadata"
    index.write_bytes(pickle.dumps({"not": "an index"}))
    name = f"{disk.POLICY}/.metadata"
    sign(folder, lambda body: body["files"].update({name: vars(disk.file_entry(index))}))
    (problem,) = resume_problems(cfg)
    assert f"{index} holds a dict, not an index of tensors" in problem


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


def _fills(job: Job, limit_bytes: int) -> tuple[list[str], str]:
    world, _, source, checkpointer = job
    policy = SmallPolicy(world, width=20_000)  # 240 k elements: 2.9 MB with optimizer state
    policy.update()
    log = Said(logging.WARNING)
    if limit_bytes and world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    checkpointer.maybe_save(4, policy, source)
    policy.update()
    while checkpointer._pending is not None:
        checkpointer.maybe_save(5, policy, source)
    root = Path(world.cfg.output_dir) / "checkpoints"
    assert (root / "step_0" / disk.NAME).is_file(), "an older checkpoint was touched"
    # Rank 0 removes what was half-written; its peers do not wait for that.
    assert world.rank or [p.name for p in root.iterdir()] == ["step_0"]
    with pytest.raises(RuntimeError) as caught:
        checkpointer.maybe_save(6, policy, source, stop=True)
    assert world.rank or [p.name for p in root.iterdir()] == ["step_0"]
    return log.lines, str(caught.value)


def _check_full(folder: Path, limit_bytes: int, reason: str) -> None:
    make(folder / "checkpoints/step_0", 0)
    results = on_ranks(config(folder, world_size=2, every=4), _fills, limit_bytes)
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
    _check_full(full_disk, 0, "No space left on device")


def test_a_write_error_of_one_rank_is_agreed_on_by_all(tmp_path):
    _check_full(tmp_path, 100_000, "File too large")


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("closed by peer")])
def test_disk_space_is_asked_for_only_where_the_disk_failed(error, tmp_path):
    world = SimpleNamespace(
        rank=0,
        gather=lambda own, **_: [own],
        watch=SimpleNamespace(wait=lambda *_, **__: contextlib.nullcontext()),
    )
    saver = Checkpointer(Config(output_dir=str(tmp_path)), world)
    written = Future()
    written.set_exception(error)
    saver._pending = SimpleNamespace(step=4, written=written)
    is_disk = isinstance(error, OSError)
    with pytest.raises(RuntimeError, match="step 4 could not be written: rank 0: ") as found:
        saver.finish()
    assert isinstance(found.value, RunFailed) == is_disk, "its message is shown alone"
    assert ("Free disk space" in str(found.value)) == is_disk


# ------------------------------------------------------------------ slow disk


def _stalls(job: Job) -> tuple[str, str]:
    world, policy, source, checkpointer = job
    log, goes_on, said = Said(), threading.Event(), []
    write = disk.write_file

    def die(why: str) -> None:  # in place of the end of the process
        said.append(f"{why}\n{world.watch.report()}")
        goes_on.set()

    def stall(*args: Any) -> None:
        assert goes_on.wait(300)
        write(*args)

    with (
        mock.patch.object(world.watch, "_die", die),
        mock.patch.object(disk, "write_file", stall if world.rank == 1 else write),
    ):
        checkpointer.maybe_save(4, policy, source)
        checkpointer.finish()
    return log.take(), said[0] if said else ""


def test_a_disk_that_stalls_is_told_from_the_peers_that_wait_for_it(tmp_path):
    cfg = config(tmp_path, world_size=2, every=4)
    cfg = changed(cfg, checkpoint=dict(write_timeout_s=3.0))
    (_, of_peer), (logged, of_slow) = on_ranks(cfg, _stalls)
    assert "the checkpoint of step 4 has been written for" in logged
    assert of_slow.startswith("deadline of 3 s passed\nrank 1 ")
    assert "in 'write checkpoint' at step 4" in of_slow
    if of_peer:  # unless the stall was over before its own deadline
        assert "rank 1" in of_peer and "in 'write checkpoint' at step 4" in of_peer
