"""Whether what the launcher started is what the config says."""

from __future__ import annotations

import shlex
import sys

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.world.launch import Launch, has_rank, launch_alone, read_launch


def find_launch(cfg: Config) -> Launch:
    """Return what the launcher told this process; a job of one rank needs no launcher.

    Raises: Refusal for a launch that `layout` does not fit, and for several ranks without one.
    """
    size = cfg.layout.world_size
    if size == 1 and not has_rank():
        launch_alone()
    if not has_rank():
        command = shlex.join(sys.argv)
        raise Refusal(
            f"layout.world_size is {size}, and no launcher started this process. Start the "
            f"{size} ranks, on one machine by\n"
            f"  torchrun --standalone --nproc-per-node {size} {command}\n"
            f"or within a Slurm allocation by\n"
            f"  srun --ntasks {size} python {command}"
        )
    launch = read_launch()
    check_launch(cfg, launch)
    return launch


def check_launch(cfg: Config, launch: Launch) -> None:
    """Refuse a number of ranks that is not that of `layout`. Raises: Refusal."""
    if launch.world_size != cfg.layout.world_size:
        raise Refusal(
            f"layout.world_size is {cfg.layout.world_size}, but {launch.launcher} started "
            f"{launch.world_size} ranks; start {cfg.layout.world_size} or {_other_way(cfg, launch)}"
        )


def _other_way(cfg: Config, launch: Launch) -> str:
    size = launch.world_size
    if not cfg.layout.roles.overlaps or size > cfg.layout.trainer_ranks:
        return f"set --layout.world-size {size}"
    if size > 1:
        return (
            f"set --layout.world-size {size} --layout.trainer-ranks {size // 2}, so that "
            "split placement leaves ranks to generate"
        )
    return (
        f"set --layout.world-size {size} --layout.placement colocated: split placement needs "
        "a rank that trains and one that generates"
    )
