"""Which objective a config names, and how the policy uses any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.sharded import ShardedModel
from spmdrl.train.coefficients import Coefficients
from spmdrl.train.objectives.distill import Distillation
from spmdrl.train.objectives.pairs import PairObjective
from spmdrl.train.objectives.rl import Job, Objective, Stats
from spmdrl.world import World


class AnyObjective(Protocol):
    """From micro-batches to a loss."""

    columns: set[str]
    """Per-token columns that `Trainer.annotate` has to find first."""

    def statistics(self, jobs: Sequence[Sequence[Job]], *, world: World) -> dict[str, Tensor]:
        """Return [] scalars of the whole batch, once before its updates; trainers meet here."""

    def __call__(
        self, model: ShardedModel, job: Job, *, step: int, statistics: Mapping[str, Tensor]
    ) -> tuple[Tensor, Stats]:
        """Run one micro-batch forward; return its share of the loss and its metrics."""


def make_objective(cfg: Config, world: World, *, coefficients: Coefficients) -> AnyObjective:
    """Return the objective that a config names, on a trainer rank.

    Args:
        coefficients: of KL and entropy bonus, which the policy moves from step to step.
    Raises: ValueError for an unknown method, or a teacher that cannot be loaded.
    """
    if cfg.objective.trains_on_pairs:
        return PairObjective(cfg)
    if cfg.objective.needs_teacher:
        return Distillation(cfg, world)
    return Objective(cfg, coefficients)
