"""Save and resume over real gloo ranks: layouts, atomicity, asynchrony, pending rollouts."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from spmdrl.checkpoint import Checkpointer
from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint import save as save_module
from spmdrl.model.tensor_parts import local_part
from tests.helpers.checkpoint_runs import (
    Job,
    config,
    dies,
    on_ranks,
    restore,
    restored,
    save,
    save_steps,
)
from tests.helpers.comparing import differing, full_state
from tests.helpers.worlds import with_trainer


def names(output_dir: Path) -> list[str]:
    return sorted(p.name for p in disk.checkpoints_folder(output_dir).iterdir())


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory) -> tuple[Path, str]:
    """A run of two data-parallel ranks with three steps saved, and its last state's digest."""
    folder = tmp_path_factory.mktemp("two_shards")
    digests = save_steps(config(folder, world_size=2), 3)
    assert digests[0] == digests[1] and len(set(digests[0])) == 3
    return folder, digests[0][2]


@pytest.mark.parametrize(
    "layout",
    [
        dict(world_size=1),
        pytest.param(dict(world_size=4), marks=pytest.mark.grid),
        dict(world_size=4, tp=2),
    ],
    ids=str,
)
def test_a_checkpoint_of_two_shards_resumes_bit_equal_on_any_layout(two_shards, layout):
    folder, saved = two_shards
    results = restored(config(folder, **layout))
    for rank, (step, name, digest, _) in enumerate(results):
        assert (step, name) == (3, "step_3"), f"rank {rank}"
        assert digest == saved, f"rank {rank} holds another state"


def test_a_tensor_parallel_checkpoint_resumes_on_one_rank(tmp_path):
    digests = save_steps(config(tmp_path, world_size=4, tp=2), 2)
    ((step, _, digest, _),) = restored(config(tmp_path))
    assert step == 2 and digest == digests[0][1]


def test_due_steps_and_the_last_are_saved_and_the_newest_stay(tmp_path):
    save_steps(config(tmp_path, every=2, steps=7, keep=3), 7)
    assert names(tmp_path) == ["step_4", "step_6", "step_7"]


def _stopped(job: Job) -> None:
    world, trainer, source, checkpointer = job
    checkpointer.maybe_save(7, trainer, source, stop=True)
    assert names(Path(world.cfg.output_dir)) == ["step_7"]


def test_a_stop_saves_and_waits_although_no_save_was_due(tmp_path):
    on_ranks(config(tmp_path, every=0), _stopped)


# ------------------------------------------------------------------ the real policy


def _policy(trainer: Any, is_new: bool) -> dict[str, torch.Tensor]:
    if is_new:
        for times in (1, 2):  # gradients that differ by element and do not depend on the layout
            gradients = {
                n: local.sin() * times for n, local in trainer.policy.optimizer.local.items()
            }
            trainer.policy.optimizer.step(gradients, lr=1e-2)
        save(trainer, 2)
    else:
        restore(trainer, step=2)
    return full_state(trainer)


@pytest.mark.parametrize(
    "on, layout",
    [
        pytest.param(dict(world_size=2), dict(world_size=1), marks=pytest.mark.grid),
        (dict(world_size=4, cp=2, tp=2), dict(world_size=2, cp=2)),
    ],
    ids=str,
)
def test_the_policy_resumes_bit_equal_on_another_layout(tmp_path, tiny_model, on, layout):
    cfg = config(tmp_path, model=str(tiny_model), **on)
    saved = with_trainer(cfg, _policy, True)
    assert any("exp_avg_sq" in name for name in saved[0])
    cfg = config(tmp_path, model=str(tiny_model), **layout)
    for rank, state in enumerate(with_trainer(cfg, _policy, False)):
        assert differing(state, saved[0]) == [], f"rank {rank}"


# ------------------------------------------------------------------ asynchrony


def _mutates_after_save(job: Job) -> str:
    world, trainer, source, checkpointer = job
    trainer.update()
    digest = trainer.digest()
    sync, disk_is_free = os.fsync, threading.Event()

    def slow_sync(handle: int) -> None:
        if not disk_is_free.wait(100):
            raise OSError("the disk is not free before the save returns")
        sync(handle)

    os.fsync = slow_sync
    checkpointer.maybe_save(1, trainer, source)
    trainer.update(3)
    source.ahead[3]["tokens"].zero_()
    assert names(Path(world.cfg.output_dir)) == ["step_1.partial"], "complete before it was written"
    disk_is_free.set()
    checkpointer.finish()
    os.fsync = sync
    return digest


def test_saving_does_not_block_and_later_updates_do_not_reach_the_file(tmp_path):
    layout = dict(world_size=3, trainers=2)
    results = on_ranks(config(tmp_path, **layout), _mutates_after_save)
    after = restored(config(tmp_path, **layout))
    assert after[0][2] == after[1][2] == results[0]
    states, step = after[0][3]
    assert step == 1 and states[0]["ahead"][3]["tokens"].tolist() == [20, 21, 22, 23, 24]


def _saves_twice(job: Job) -> tuple[list[str], list[dict[str, int]]]:
    _, trainer, source, checkpointer = job
    addresses: list[dict[str, int]] = []
    stage = DefaultStager.stage

    def watched(self: DefaultStager, state: dict[str, Any]) -> Any:
        staged = stage(self, state)
        addresses.append({name: local_part(t).data_ptr() for name, t in staged.items()})
        return staged

    digests = []
    with mock.patch.object(DefaultStager, "stage", watched):
        for step in (1, 2):
            trainer.update()
            digests.append(trainer.digest())
            checkpointer.maybe_save(step, trainer, source)
            trainer.update(3)
        checkpointer.finish()
    return digests, addresses


def test_a_second_save_takes_the_memory_of_the_first_and_both_are_right(tmp_path):
    layout = dict(world_size=2)
    results = on_ranks(config(tmp_path, **layout), _saves_twice)
    for _, (first, second) in results:
        assert first == second and len(first) > 8
    for at, step in ((1, "step_2"), (0, "step_1")):
        after = restored(config(tmp_path, **layout))
        assert [(rank[1], rank[2]) for rank in after] == [(step, results[0][0][at])] * 2
        shutil.rmtree(disk.checkpoints_folder(tmp_path) / step)


def test_memory_is_pinned_on_gpus_and_a_save_waits_for_its_copies(monkeypatch):
    found: list[StagingOptions] = []
    monkeypatch.setattr(save_module, "DefaultStager", found.append)
    for kind in ("cpu", "cuda"):
        own = Checkpointer.__new__(Checkpointer)
        own._stager = None
        own.world = SimpleNamespace(device=torch.device(kind))
        own._staging()
    assert [one.use_pinned_memory for one in found] == [False, True]
    assert [one.use_non_blocking_copy for one in found] == [False, True]
    assert not any(one.use_async_staging or one.use_shared_memory for one in found)


# ------------------------------------------------------------------ pending rollouts


def test_rollouts_made_ahead_reach_every_rank_of_another_placement(tmp_path):
    layout = dict(world_size=4, trainers=2, inference_tp=1)
    save_steps(config(tmp_path, **layout), 1)
    for step, _, _, (states, at) in restored(config(tmp_path, world_size=2)):
        assert step == at == 1
        assert [s["ahead"][3]["tokens"][0].item() for s in states] == [20, 30]
        assert states[0]["ahead"][3]["sums"] == {"a": (1.0, 2.0)}
        assert states[0]["ahead"][3]["samples"] == ({"prompt": "1+1="},)


def _draws(job: Job, is_new: bool) -> list[float]:
    world, trainer, source, checkpointer = job
    if is_new:
        torch.manual_seed(world.rank + 5)
        torch.rand(3)
        checkpointer.maybe_save(1, trainer, source)
        checkpointer.finish()
    else:
        checkpointer.restore(trainer, source)
    return torch.rand(4).tolist()


def test_random_generators_go_on_where_they_were_on_each_rank(tmp_path):
    cfg = config(tmp_path, world_size=2)
    before = on_ranks(cfg, _draws, True)
    assert before[0] != before[1]
    assert on_ranks(cfg, _draws, False) == before


# ------------------------------------------------------------------ killed while saving


@pytest.mark.parametrize(
    "point",
    [*(pytest.param(at, marks=pytest.mark.kill) for at in ("writing", "manifest")), "complete"],
)
def test_a_kill_in_the_middle_of_a_save_leaves_the_older_checkpoint(tmp_path, point):
    cfg = config(tmp_path, world_size=2)
    with pytest.raises(AssertionError, match="died without a result"):
        on_ranks(cfg, dies, point)
    assert names(tmp_path) == ["step_1", "step_2.partial"]
    results = restored(cfg)
    assert [result[0] for result in results] == [1, 1]
    assert names(tmp_path) == ["step_1"], "what was left half-written is removed"
