"""The models beside the policy: each annotates batches, some train on them or follow the policy.

All are sharded like the policy and run on the trainer ranks, which walk through them in the
same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded import ShardedModel
from spmdrl.train.companions.process_reward_model import ProcessRewardModel
from spmdrl.train.companions.reference import Frozen, make_reference
from spmdrl.train.companions.value_model import ValueModel
from spmdrl.train.objectives.rl import Job
from spmdrl.types import Sums
from spmdrl.world import World


class Companion(Protocol):
    """A model beside the policy."""

    def columns(self, rows: Sequence[ScoredRow]) -> list[dict[str, Tensor]]:
        """Return, per packed row, per-token columns by name: [T] float32, 0 off the scored."""

    def update(self, jobs: Sequence[Sequence[Job]], *, step: int) -> Sums:
        """Train on a step's batch, before the policy does; return sums over all trainers."""

    def follow(self, policy: ShardedModel, *, step: int) -> None:
        """Take over from the policy what is to be taken, after its update of this step."""

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint keeps, as TrainedModel does; {} if it never changes."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""


def make_companions(
    cfg: Config, world: World, *, policy: ShardedModel, columns: Collection[str]
) -> dict[str, Companion]:
    """Return the models that the wanted columns come from, by name, on a trainer rank.

    Raises: ValueError when one cannot be loaded or laid out, or cannot read the policy's rows.
    """
    found: dict[str, Companion] = {}
    if "ref_logprobs" in columns:
        found["reference"] = make_reference(cfg, world, policy=policy)
    if "teacher_logprobs" in columns:
        found["teacher"] = Frozen(cfg, world, path=cfg.model.teacher, column="teacher_logprobs")
    if "values" in columns:
        found["critic"] = ValueModel(cfg, world, policy=policy)
    if "prm_logprobs" in columns:
        found["prm"] = ProcessRewardModel(cfg, world, policy=policy)
    return found
