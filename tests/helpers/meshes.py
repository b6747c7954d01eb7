"""One job of four trainer ranks under one mesh after another, without starting it anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from spmdrl.config import Config, LayoutSettings, trainer_ranks
from spmdrl.world.mesh import make_expert_mesh, make_meshes
from tests.helpers.worlds import ON_CPU

TRAINERS = 4
MESHES = {  # (dp_replicate, dp_shard, cp, tp)
    "shard4": (1, 4, 1, 1),
    "replicate2 shard2": (2, 2, 1, 1),
    "cp4": (1, 1, 4, 1),
    "tp4": (1, 1, 1, 4),
    "shard2 cp2": (1, 2, 2, 1),
    "shard2 tp2": (1, 2, 1, 2),
    "cp2 tp2": (1, 1, 2, 2),
    "replicate2 cp2": (2, 1, 2, 1),
    "replicate2 tp2": (2, 1, 1, 2),
}
EXPERT_MESHES = {  # and ep, of dp_shard * cp * tp
    "shard4 ep4": (1, 4, 1, 1, 4),
    "shard4 ep2": (1, 4, 1, 1, 2),
    "cp2 ep2": (1, 2, 2, 1, 2),
    "replicate2 ep2": (2, 2, 1, 1, 2),
    "tp4 ep4": (1, 1, 1, 4, 4),
    "shard2 tp2 ep2": (1, 2, 1, 2, 2),
    "cp2 tp2 ep4": (1, 1, 2, 2, 4),
    "replicate2 tp2 ep2": (2, 1, 1, 2, 2),
}
ALONE = replace(ON_CPU, placement="split", world_size=TRAINERS, trainer_ranks=1)
"""One of the same ranks trains, and nothing else happens."""


def layout_of(mesh: str, *, inference_tp: int = 0) -> LayoutSettings:
    """Return a layout whose trainers have this mesh; beside them one engine, or none at 0."""
    replicate, _, cp, tp, ep = (*(MESHES | EXPERT_MESHES)[mesh], 1)[:5]
    return replace(
        ON_CPU,
        placement="split" if inference_tp else "offline",
        world_size=TRAINERS + inference_tp,
        trainer_ranks=TRAINERS,
        inference_tp=max(1, inference_tp),
        dp_replicate=replicate,
        cp=cp,
        tp=tp,
        ep=ep,
    )


def world_under(base: Any, cfg: Config) -> Any:
    """Return the running job's world under another layout of the same ranks; on every rank."""
    if cfg.layout not in _made:
        _made[cfg.layout] = _groups(base, cfg)
    mesh, sharding, experts, group = _made[cfg.layout]
    return replace(
        base, cfg=cfg, trainer_control=group, mesh=mesh, sharding=sharding, experts=experts
    )


_made: dict[LayoutSettings, tuple[Any, ...]] = {}
"""Of this job: every group has threads, and those of a hundred meshes keep a machine busy."""


def _groups(base: Any, cfg: Config) -> tuple[Any, ...]:
    mesh, sharding = make_meshes(cfg, base.device)
    experts = make_expert_mesh(cfg, base.device)
    group = dist.new_group(trainer_ranks(cfg), backend="gloo")
    return mesh, sharding, experts, group
