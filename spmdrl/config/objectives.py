"""Properties of objectives, one entry of a table each.

An objective is an entry here, a choice of `algorithm.objective`, and a file in
`spmdrl/train/objectives`, which makes a loss of micro-batches. Other rooms ask for its properties
and never compare names, so that checks and --dry-run need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Objective:
    """Properties of an objective that are known before anything is loaded."""

    loss_class: str
    """`module:class` that makes its loss, see train/objectives/objective_loss.py."""
    loss_kind: Literal["loss", "preference", "reward_model", "distillation"]
    """Kind of its loss in algorithms/registry.py."""
    row: Literal["prompt", "example", "pair"]
    """What a row of data.train must have, see data/rows.py."""
    only_loss: str = ""
    """Name of its loss, if it has only one and `algorithm.loss` is ignored."""
    samples: bool = False
    """Whether it samples rollouts and rewards them. If not, it trains on the rows, under the
    placement `offline`."""
    has_advantages: bool = False
    """Whether it trains by advantages, with `algorithm`'s correction, KL and entropy."""
    trains_on_pairs: bool = False
    """Whether two sequences train together: those of a row, or the best and the worst of a prompt's
    group."""
    is_scalar: bool = False
    """Whether the model has one number per token instead of logits."""
    needs_teacher: bool = False
    """Whether it follows `model.teacher`, whatever the loss."""
    headline: str = "policy/loss"
    """Metric whose trend the console shows."""


OBJECTIVES = {
    "rl": Objective(
        loss_class="spmdrl.train.objectives.rl:RolloutLoss",
        loss_kind="loss",
        row="prompt",
        samples=True,
        has_advantages=True,
        headline="reward/mean",
    ),
    "sft": Objective(
        loss_class="spmdrl.train.objectives.sft:SupervisedLoss",
        loss_kind="loss",
        row="example",
        only_loss="sft",
    ),
    "preference": Objective(
        loss_class="spmdrl.train.objectives.pairs:PairLoss",
        loss_kind="preference",
        row="pair",
        trains_on_pairs=True,
    ),
    "reward_model": Objective(
        loss_class="spmdrl.train.objectives.pairs:PairLoss",
        loss_kind="reward_model",
        row="pair",
        trains_on_pairs=True,
        is_scalar=True,
    ),
    "distill": Objective(
        loss_class="spmdrl.train.objectives.distill:DistillationLoss",
        loss_kind="distillation",
        row="example",
        needs_teacher=True,
    ),
    "online_preference": Objective(
        loss_class="spmdrl.train.objectives.pairs:OnlinePairLoss",
        loss_kind="preference",
        row="prompt",
        samples=True,
        trains_on_pairs=True,
        headline="reward/mean",
    ),
    "on_policy_distill": Objective(
        loss_class="spmdrl.train.objectives.distill:DistillationLoss",
        loss_kind="distillation",
        row="prompt",
        samples=True,
        needs_teacher=True,
        headline="policy/distill",
    ),
}
