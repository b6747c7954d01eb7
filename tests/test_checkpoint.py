"""Save and resume over real gloo ranks: layouts, atomicity, asynchrony, pending rollouts."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_runs import SmallSource, config, restored, save_steps, start
from ranks import run_ranks
from torch.distributed.tensor import DTensor

from spmdrl.checkpoint import Checkpointer
from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.state import tensor_leaves
from spmdrl.config import Config
from spmdrl.world import World


def names(output_dir: Path) -> list[str]:
    return sorted(p.name for p in disk.checkpoints_folder(output_dir).iterdir())


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory) -> tuple[Path, str]:
    """A run of two data-parallel ranks with three steps saved, and its last state's digest."""
    folder = tmp_path_factory.mktemp("two_shards")
    digests = run_ranks(2, save_steps, config(folder, world_size=2), 3)
    assert digests[0] == digests[1] and len(set(digests[0])) == 3
    return folder, digests[0][2]


@pytest.mark.parametrize(
    "layout", [dict(world_size=1), dict(world_size=4), dict(world_size=4, tp=2)], ids=str
)
def test_a_checkpoint_of_two_shards_resumes_bit_equal_on_any_layout(two_shards, layout):
    folder, saved = two_shards
    results = run_ranks(layout["world_size"], restored, config(folder, **layout))
    for rank, (step, name, digest, _) in enumerate(results):
        assert (step, name) == (3, "step_3"), f"rank {rank}"
        assert digest == saved, f"rank {rank} holds another state"


def test_a_tensor_parallel_checkpoint_resumes_on_one_rank(tmp_path):
    digests = run_ranks(4, save_steps, config(tmp_path, world_size=4, tp=2), 2)
    ((step, _, digest, _),) = run_ranks(1, restored, config(tmp_path))
    assert step == 2 and digest == digests[0][1]


def test_due_steps_and_the_last_are_saved_and_the_newest_stay(tmp_path):
    run_ranks(1, save_steps, config(tmp_path, every=2, steps=7, keep=3), 7)
    assert names(tmp_path) == ["step_4", "step_6", "step_7"]


def _stopped(cfg: Config) -> None:
    world, trainer, source, checkpointer = start(cfg)
    checkpointer.maybe_save(7, trainer, source, stop=True)
    assert names(Path(cfg.output_dir)) == ["step_7"]
    world.close()


def test_a_stop_saves_and_waits_although_no_save_was_due(tmp_path):
    run_ranks(1, _stopped, config(tmp_path, every=0))


# ------------------------------------------------------------------ the real policy


def _policy(cfg: Config, save: bool) -> dict[str, bytes]:
    from spmdrl.roles import make_trainer

    world = World.start(cfg)
    trainer, source, checkpointer = (
        make_trainer(cfg, world),
        SmallSource(world),
        Checkpointer(cfg, world),
    )
    if save:
        for times in (1, 2):  # gradients that differ by element and do not depend on the layout
            gradients = {
                n: local.sin() * times for n, local in trainer.policy.optimizer.local.items()
            }
            trainer.policy.optimizer.step(gradients, lr=1e-2)
        checkpointer.maybe_save(2, trainer, source, stop=True)
    else:
        assert checkpointer.restore(trainer, source).step == 2
    state = tensor_leaves(trainer.state_dict())
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    world.close()
    return {name: tensor.numpy().tobytes() for name, tensor in whole.items()}


@pytest.mark.parametrize(
    "on, layout",
    [
        (dict(world_size=2), dict(world_size=1)),
        (dict(world_size=4, cp=2, tp=2), dict(world_size=2, cp=2)),
    ],
    ids=str,
)
def test_the_policy_resumes_bit_equal_on_another_layout(tmp_path, tiny_model, on, layout):
    cfg = config(tmp_path, model=str(tiny_model), **on)
    saved = run_ranks(on["world_size"], _policy, cfg, True)
    assert any("exp_avg_sq" in name for name in saved[0])
    cfg = config(tmp_path, model=str(tiny_model), **layout)
    for rank, state in enumerate(run_ranks(layout["world_size"], _policy, cfg, False)):
        assert state.keys() == saved[0].keys()
        assert [n for n in state if state[n] != saved[0][n]] == [], f"rank {rank}"


# ------------------------------------------------------------------ asynchrony


def _mutates_after_save(cfg: Config) -> str:
    world, trainer, source, checkpointer = start(cfg)
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
    assert names(Path(cfg.output_dir)) == ["step_1.partial"], "complete before it was written"
    disk_is_free.set()
    checkpointer.finish()
    os.fsync = sync
    world.close()
    return digest


def test_saving_does_not_block_and_later_updates_do_not_reach_the_file(tmp_path):
    layout = dict(world_size=3, trainers=2)
    results = run_ranks(3, _mutates_after_save, config(tmp_path, **layout))
    after = run_ranks(3, restored, config(tmp_path, **layout))
    assert after[0][2] == after[1][2] == results[0]
    states, step = after[0][3]
    assert step == 1 and states[0]["ahead"][3]["tokens"].tolist() == [20, 21, 22, 23, 24]


# ------------------------------------------------------------------ pending rollouts


def test_rollouts_made_ahead_reach_every_rank_of_another_placement(tmp_path):
    layout = dict(world_size=4, trainers=2, inference_tp=1)
    run_ranks(4, save_steps, config(tmp_path, **layout), 1)
    for step, _, _, (states, at) in run_ranks(2, restored, config(tmp_path, world_size=2)):
        assert step == at == 1
        assert [s["ahead"][3]["tokens"][0].item() for s in states] == [20, 30]
        assert states[0]["ahead"][3]["sums"] == {"a": (1.0, 2.0)}
        assert states[0]["ahead"][3]["samples"] == ({"prompt": "1+1="},)


def _draws(cfg: Config, save: bool) -> list[float]:
    world, trainer, source, checkpointer = start(cfg)
    if save:
        torch.manual_seed(world.rank + 5)
        torch.rand(3)
        checkpointer.maybe_save(1, trainer, source)
        checkpointer.finish()
    else:
        checkpointer.restore(trainer, source)
    world.close()
    return torch.rand(4).tolist()


def test_random_generators_go_on_where_they_were_on_each_rank(tmp_path):
    cfg = config(tmp_path, world_size=2)
    before = run_ranks(2, _draws, cfg, True)
    assert before[0] != before[1]
    assert run_ranks(2, _draws, cfg, False) == before


# ------------------------------------------------------------------ killed while saving


def _killed_at(cfg: Config, point: str) -> None:
    _world, trainer, source, checkpointer = start(cfg)
    trainer.update()
    checkpointer.maybe_save(1, trainer, source)
    checkpointer.finish()

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.update()
    if point == "writing":
        threading.Thread(
            target=_die_when_written,
            daemon=True,
            args=(Path(cfg.output_dir) / "checkpoints/step_2.partial", die),
        ).start()
        os.fsync = lambda handle: time.sleep(1000)  # bytes are there, the disk is not done
    elif point == "manifest":
        disk.write_manifest = die
    elif point == "rename":
        os.rename = die
    checkpointer.maybe_save(2, trainer, source)
    checkpointer.finish()


def _die_when_written(partial: Path, die) -> None:
    while not any(p.stat().st_size for p in partial.glob("policy/*.distcp")):
        time.sleep(0.005)
    die()


@pytest.mark.parametrize("point", ["writing", "manifest", "rename"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_older_checkpoint(tmp_path, point):
    cfg = config(tmp_path, world_size=2)
    with pytest.raises(AssertionError, match="died without a result"):
        run_ranks(2, _killed_at, cfg, point)
    assert names(tmp_path) == ["step_1", "step_2.partial"]
    results = run_ranks(2, restored, cfg)
    assert [result[0] for result in results] == [1, 1]
    assert names(tmp_path) == ["step_1"], "what was left half-written is removed"
