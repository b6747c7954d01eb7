"""The meshes of the trainer ranks: one for the work, two for the shards of parameters."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config, trainer_ranks
from spmdrl.world.axes import axes_of
from spmdrl.world.torch_internals import unflatten_axis

MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


def mesh_shape(cfg: Config) -> tuple[int, int, int, int]:
    """Return the sizes of the trainer mesh in the order of MESH_AXES."""
    axes = axes_of(cfg)
    return axes.dp_replicate, axes.dp_shard, axes.cp, axes.tp


def make_meshes(cfg: Config, device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the trainer mesh with MESH_AXES, and with dp_shard and cp as one axis `fsdp`.

    Parameters are sharded over the second: the ranks of one cp group work on the same sequences and
    hold different shards. Every rank of the job must call it, trainer or not.
    """
    replicate, shard, cp, tp = mesh_shape(cfg)
    ranks = torch.tensor(trainer_ranks(cfg)).view(replicate, shard * cp, tp)
    sharding = DeviceMesh(device.type, ranks, mesh_dim_names=("dp_replicate", "fsdp", "tp"))
    return unflatten_axis(sharding, 1, sizes=(shard, cp), names=("dp_shard", "cp")), sharding


def make_expert_mesh(cfg: Config, device: torch.device) -> DeviceMesh | None:
    """Return the trainers with axes dp_replicate, efsdp and ep, over which experts are sharded.

    All ranks of a replica have different tokens, also tp ranks (sequence_parallel.py), so experts
    are cut over all of them. None without ep and tp. Every rank of the job must call it, trainer or
    not.
    """
    replicate, _, _, tp = mesh_shape(cfg)
    ep = cfg.layout.ep
    if ep == tp == 1:
        return None
    ranks = torch.tensor(trainer_ranks(cfg)).view(replicate, -1, ep)
    return DeviceMesh(device.type, ranks, mesh_dim_names=("dp_replicate", "efsdp", "ep"))
