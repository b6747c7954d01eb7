"""What the rooms ask of an objective: one entry of a table each.

An objective is an entry here, its name among the choices of `algorithm.objective`, and a file in
`spmdrl/train/objectives`, which makes a loss of micro-batches. All that others need to know of it
stands here: nobody compares names, and checks and --dry-run know it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Objective:
    """What is known of an objective before anything is loaded."""

    loss_class: str
    """`module:class` of what makes its loss, see train/objectives/objective_loss.py."""
    loss_kind: Literal["loss", "preference", "reward_model", "distillation"]
    """Kind of method that its loss is, see algorithms/registry.py."""
    row: Literal["prompt", "example", "pair"]
    """What a row of data.train must hold, see data/rows.py."""
    only_loss: str = ""
    """Name of its loss, where `algorithm.loss` has no say."""
    samples: bool = False
    """Samples rollouts, which are rewarded. Else it trains on the rows themselves, under the
    placement `offline`."""
    has_advantages: bool = False
    """Trains by advantages of what it sampled, with `algorithm`'s correction, KL and entropy."""
    trains_on_pairs: bool = False
    """Two sequences train together: a row's, or the best and the worst that a prompt's group
    sampled."""
    is_scalar: bool = False
    """Trains a model with one number per token instead of the vocabulary's logits."""
    needs_teacher: bool = False
    """Follows `model.teacher`, whatever the loss."""
    headline: str = "policy/loss"
    """The metric whose trend is shown."""


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
