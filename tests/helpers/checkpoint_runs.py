"""A small sharded policy and a source with pending rollouts, for the checkpoint tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spmdrl.checkpoint import Checkpointer
from spmdrl.checkpoint import manifest as disk
from spmdrl.config import CheckpointSettings, Config, KeepSettings, ModelSettings
from spmdrl.world.world import World
from tests.helpers.policy_runs import own_batch, update
from tests.helpers.ranks import run_ranks
from tests.helpers.worlds import ON_CPU


def config(
    output_dir: Path | str,
    *,
    trainers: int | None = None,
    steps: int = 100,
    every: int = 1,
    keep: int | KeepSettings = 2,
    resume: str = "auto",
    seed: int = 0,
    allow: bool = False,
    model: str = "",
    **layout: int,
) -> Config:
    """Return a config of a job with these ranks; without `trainers` all ranks train."""
    split = {"placement": "split", "trainer_ranks": trainers} if trainers else {}
    return Config(
        output_dir=str(output_dir),
        steps=steps,
        seed=seed,
        model=ModelSettings(path=model),
        layout=replace(ON_CPU, **layout, **split),
        checkpoint=CheckpointSettings(
            every_steps=every,
            resume=resume,
            keep=KeepSettings(last=keep) if isinstance(keep, int) else keep,
            allow_config_change=allow,
        ),
    )


class SmallPolicy:
    """Two linear layers under FSDP2 (and tensor parallelism) with AdamW."""

    def __init__(self, world: World, *, width: int = 12):
        self.world = world
        if not world.is_trainer:
            return
        torch.manual_seed(0)
        # 6 rows over 4 ranks: uneven shards.
        self.model = nn.Sequential(
            nn.Linear(width, 6, bias=False),
            nn.ReLU(),
            nn.Linear(6, width, bias=False),
            nn.LayerNorm(width),
        )
        parallelize_module(
            self.model, world.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        fully_shard(self.model, mesh=world.mesh["dp_replicate", "dp_shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def update(self, times: int = 1) -> None:
        """Take optimizer steps on inputs that all ranks share."""
        for k in range(times if self.world.is_trainer else 0):
            x = torch.linspace(-1, 1, 4 * self.model[0].in_features).view(4, -1)
            self.model(x * (k + 1)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the live shards."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the shards back."""
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def digest(self) -> str:
        """Return one digest of every full tensor; equal states have equal ones on any layout."""
        total = hashlib.sha256()
        if self.world.is_trainer:
            state = self.state_dict()
            for name, tensor in sorted(state["model"].items()):
                _add(total, name, tensor)
            for name, entry in sorted(state["optimizer"]["state"].items()):
                for key, tensor in sorted(entry.items()):
                    _add(total, f"{name} {key}", tensor)
        return total.hexdigest()


def _add(total: Any, name: str, tensor: Tensor) -> None:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    total.update(name.encode() + full.detach().contiguous().numpy().tobytes())


class SmallSource:
    """Holds one tensor made ahead on the leader of each engine replica."""

    def __init__(self, world: World):
        self.world = world
        self.loaded: tuple[list[dict[str, Any]], int] | None = None
        self.ahead = {
            3: {
                "tokens": torch.arange(5) + 10 * world.rank,
                "sums": {"a": (1.0, 2.0)},
                "samples": ({"prompt": "1+1="},),
            }
        }

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was made ahead."""
        return {"ahead": self.ahead} if self.world.replica_rank == 0 else None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Keep what comes, for the test to look at."""
        self.loaded = (states, step)

    def start(self, step: int) -> None:
        """Do nothing."""


Job = tuple[World, SmallPolicy, SmallSource, Checkpointer]
"""What one rank of a job has."""


def start(cfg: Config) -> Job:
    """Start one rank of a job."""
    world = World.start(cfg)
    return world, SmallPolicy(world), SmallSource(world), Checkpointer(cfg, world)


def on_ranks(cfg: Config, body: Callable, *args: Any) -> list[Any]:
    """Run `body(job, *args)` on every rank of a job; return what it gave, in rank order."""
    return run_ranks(cfg.layout.world_size, _on_rank, cfg, body, args)


def _on_rank(cfg: Config, body: Callable, args: tuple) -> Any:
    job = start(cfg)
    found = body(job, *args)
    job[0].close()
    return found


def save_steps(cfg: Config, steps: int, rewards: dict[int, float] | None = None) -> list[list[str]]:
    """Train and save at every step of all ranks; return the state's digests of each.

    Args:
        rewards: eval/reward by step, where it was evaluated.
    """
    return on_ranks(cfg, _save_steps, steps, rewards or {})


def _save_steps(job: Job, steps: int, rewards: dict[int, float]) -> list[str]:
    _, trainer, source, checkpointer = job
    digests = []
    for step in range(1, steps + 1):
        trainer.update()
        evaluated = {"eval/reward": (rewards[step], 1)} if step in rewards else {}
        checkpointer.maybe_save(step, trainer, source, evaluated=evaluated)
        digests.append(trainer.digest())
    checkpointer.finish()
    return digests


def restored(cfg: Config) -> list[tuple[int, str, str, Any]]:
    """Restore on all ranks; return step, folder, the state's digest and what the source got."""
    return on_ranks(cfg, _restored)


def _restored(job: Job) -> tuple[int, str, str, Any]:
    _, trainer, source, checkpointer = job
    trainer.update(2)  # whatever was there before is overwritten
    state = checkpointer.restore(trainer, source)
    return state.step, Path(state.resumed_from).name, trainer.digest(), source.loaded


_POINTS: dict[str, tuple[Any, str, int, str]] = {
    "manifest": (disk, "write_manifest", 0, "step_2.partial"),
    "complete": (os, "rename", 1, "step_2"),
    "best": (os, "rename", 1, "best"),
    "removal": (shutil, "rmtree", 0, "step_1.partial"),
}
"""{point: (module, its function, which argument, the last part of the path in it)}"""


def dies(job: Job, point: str) -> None:
    """Save, and be killed at a point of the save of a better policy.

    Args:
        point: `writing`, when bytes are there and the disk is not done; `manifest`, before it is
            written; `complete`, before the save gets its own name; `best`, before the link to the
            best gets its own; or `removal`, before the former best is removed.
    """
    world, trainer, source, checkpointer = job
    checkpointer.maybe_save(1, trainer, source, evaluated={"eval/reward": (0.5, 1)})
    checkpointer.finish()
    partial = Path(world.cfg.output_dir) / "checkpoints/step_2.partial"
    if point == "writing":
        threading.Thread(target=_die_when_written, daemon=True, args=(partial,)).start()
        os.fsync = lambda handle: time.sleep(1000)
    else:
        owner, function, argument, name = _POINTS[point]
        before = getattr(owner, function)

        def die(*args: object, **options: object) -> None:
            if Path(str(args[argument])).name == name:
                os.kill(os.getpid(), signal.SIGKILL)
            before(*args, **options)

        setattr(owner, function, die)
    trainer.update()
    checkpointer.maybe_save(2, trainer, source, evaluated={"eval/reward": (0.7, 1)})
    checkpointer.finish()


def _die_when_written(partial: Path) -> None:
    while not any(p.stat().st_size for p in partial.glob("policy/*.distcp")):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def save(trainer: Any, step: int, cfg: Config | None = None) -> None:
    """Save what a trainer is after a step, where a config says, its own by default, and wait for
    the disk."""
    Checkpointer(cfg or trainer.world.cfg, trainer.world).maybe_save(
        step, trainer, SmallSource(trainer.world), stop=True
    )


def restore(trainer: Any, cfg: Config | None = None, *, step: int) -> None:
    """Restore a trainer from the checkpoint of a step that a config, its own by default, names."""
    own = Checkpointer(cfg or trainer.world.cfg, trainer.world)
    assert own.restore(trainer, SmallSource(trainer.world)).step == step


def after_two_updates(trainer: Any, *, is_new: bool) -> Any:
    """Give a real policy two updates, now and saved, or restored; return its batch."""
    own = own_batch(trainer.world)
    if not is_new:
        restore(trainer, step=2)
        return own
    for step in range(2):
        update(trainer, own, step=step)
    save(trainer, 2)
    return own
