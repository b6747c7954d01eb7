"""How the ranks of a job are laid out along its axes, and which layouts are possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from spmdrl.config import Config, trainer_ranks
from spmdrl.config.engine_traits import ENGINE_TRAITS
from spmdrl.config.placements import PLACEMENTS, Placement
from spmdrl.imports import divisors


@dataclass(frozen=True)
class Axes:
    """How the ranks of a job are laid out."""

    placement: str = "offline"
    world_size: int = 1
    trainers: int = 1
    dp_replicate: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    inference_tp: int = 1
    inference_dp: int = 1

    @property
    def fsdp(self) -> int:
        """Ranks that share the shards of a parameter: dp_shard * cp."""
        return self.trainers // (self.dp_replicate * self.tp)

    @property
    def replica(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.fsdp * self.tp

    @property
    def dp_shard(self) -> int:
        """Size of the data-parallel axis over which parameters are sharded."""
        return self.fsdp // self.cp

    @property
    def dp_size(self) -> int:
        """Parts that a batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def roles(self) -> Placement:
        """What `placement` means."""
        return PLACEMENTS[self.placement]

    @property
    def engines(self) -> int:
        """Ranks that generate."""
        return len(self.roles.inference_ranks(self.world_size, trainers=self.trainers))

    @property
    def replicas(self) -> int:
        """Engine replicas."""
        return self.engines // self.replica_ranks

    @property
    def replica_ranks(self) -> int:
        """Ranks of one engine replica."""
        return self.inference_tp * self.inference_dp

    def span(self, axis: str) -> int:
        """Return how many consecutive ranks a group of an axis spans. tp is innermost, then cp,
        dp_shard, dp_replicate."""
        return {
            "tp": self.tp,
            "cp": self.tp * self.cp,
            "ep": self.ep,
            "fsdp": self.replica,
            "dp_replicate": self.replica * self.dp_replicate,
        }[axis]


def axes_of(cfg: Config) -> Axes:
    """Return the layout that a config describes."""
    own = {f.name: getattr(cfg.layout, f.name) for f in fields(Axes) if f.name != "trainers"}
    return Axes(trainers=len(trainer_ranks(cfg)), **own)


def rank_problems(axes: Axes, *, engine_kind: str) -> Iterator[str]:
    """Yield why ranks cannot be laid out like this, each as `field: what, value seen`.

    The requirements of a model are in model/divisibility.py.

    Args:
        engine_kind: engine.kind.
    """
    trainers = axes.trainers
    engines = axes.engines
    replica_ranks = axes.replica_ranks
    sizes = f"inference_tp {axes.inference_tp}"
    if axes.inference_dp > 1:
        sizes += f" * inference_dp {axes.inference_dp}"
    if axes.roles.overlaps and not 0 < trainers < axes.world_size:
        yield (
            f"layout.trainer_ranks: split placement with world_size {axes.world_size} and "
            f"trainer_ranks {trainers} leaves {axes.world_size - trainers} ranks to generate; "
            "lower trainer_ranks or start more ranks"
        )
    fixed = axes.dp_replicate * axes.cp * axes.tp
    if trainers % fixed:
        yield (
            f"layout: {trainers} trainer ranks do not divide by dp_replicate {axes.dp_replicate}"
            f" * cp {axes.cp} * tp {axes.tp} = {fixed}; {trainers} / {fixed} = "
            f"{trainers / fixed:g} dp_shard"
        )
    elif axes.replica % axes.ep:
        yield (
            f"layout.ep: {axes.ep} does not divide the {axes.replica} ranks of dp_shard * cp * "
            f"tp; values that do: {divisors(axes.replica)}"
        )
    if engines % replica_ranks:
        yield (
            f"layout.inference_tp: {engines} inference ranks / {sizes} = "
            f"{engines / replica_ranks:g} replicas, not whole"
        )
    for name in ("inference_tp", "inference_dp"):
        size = getattr(axes, name)
        if size > 1 and not ENGINE_TRAITS[engine_kind].has_own_models:
            yield (
                f"layout.{name}: {size} with engine.kind transformers, whose "
                "engine holds the whole model on one rank; set it to 1, or take vllm"
            )
    if axes.roles.overlaps and trainers % replica_ranks:
        yield (
            f"layout.trainer_ranks: vLLM lays groups of {replica_ranks} "
            f"over all ranks from 0, so trainer_ranks {trainers} must be a multiple of "
            f"{sizes} (got {trainers / replica_ranks:g})"
        )
