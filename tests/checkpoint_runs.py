"""A small sharded policy and a source with pending rollouts, for the checkpoint tests."""

from __future__ import annotations

import hashlib
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
from spmdrl.config import CheckpointSettings, Config, KeepSettings, LayoutSettings, ModelSettings
from spmdrl.world import World


def config(
    output_dir: Path | str,
    *,
    world_size: int = 1,
    trainers: int | None = None,
    cp: int = 1,
    tp: int = 1,
    inference_tp: int = 1,
    steps: int = 100,
    every: int = 1,
    keep: int | KeepSettings = 2,
    resume: str = "auto",
    seed: int = 0,
    allow: bool = False,
    model: str = "",
) -> Config:
    """Return a config of a job with these ranks; without `trainers` all ranks train."""
    split = trainers is not None
    return Config(
        output_dir=str(output_dir),
        steps=steps,
        seed=seed,
        model=ModelSettings(path=model),
        layout=LayoutSettings(
            placement="split" if split else "offline",
            world_size=world_size,
            trainer_ranks=trainers or world_size,
            cp=cp,
            tp=tp,
            inference_tp=inference_tp,
            device="cpu",
            wait_timeout_s=200,
            startup_timeout_s=300,
        ),
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
        return {"ahead": self.ahead} if self.world.inference_tp_rank == 0 else None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Keep what comes, for the test to look at."""
        self.loaded = (states, step)


def start(cfg: Config) -> tuple[World, SmallPolicy, SmallSource, Checkpointer]:
    """Start one rank of a job."""
    world = World.start(cfg)
    return world, SmallPolicy(world), SmallSource(world), Checkpointer(cfg, world)


def save_steps(cfg: Config, steps: int, rewards: dict[int, float] | None = None) -> list[str]:
    """Train and save at every step of one rank; return the state's digest after each.

    Args:
        rewards: eval/reward by step, where it was evaluated.
    """
    world, trainer, source, checkpointer = start(cfg)
    digests = []
    for step in range(1, steps + 1):
        trainer.update()
        found = rewards.get(step) if rewards else None
        checkpointer.maybe_save(
            step, trainer, source, evaluated={} if found is None else {"eval/reward": (found, 1)}
        )
        digests.append(trainer.digest())
    checkpointer.finish()
    world.close()
    return digests


def restored(cfg: Config) -> tuple[int, str, str, Any]:
    """Restore on one rank; return step, folder, the state's digest and what the source got."""
    world, trainer, source, checkpointer = start(cfg)
    trainer.update(2)  # whatever was there before is overwritten
    state = checkpointer.restore(trainer, source)
    result = state.step, Path(state.resumed_from).name, trainer.digest(), source.loaded
    world.close()
    return result


def after_two_updates(cfg: Config, world: World, *, save: bool) -> tuple[Any, Any]:
    """Return a real policy that has taken two updates, and its batch: it took them now, and saved
    a checkpoint, or it is restored from that."""
    from policy_runs import batch, update

    from spmdrl.roles import make_trainer

    trainer, source, checkpointer = (
        make_trainer(cfg, world),
        SmallSource(world),
        Checkpointer(cfg, world),
    )
    own = batch(world.dp_index(world.rank), world.dp_size)
    if save:
        for step in range(2):
            update(trainer, own, step=step)
        checkpointer.maybe_save(2, trainer, source, stop=True)
    else:
        assert checkpointer.restore(trainer, source).step == 2
    return trainer, own
