"""Helpers of the preference losses: the pairs in the loss, log-ratios, stats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.losses.common import MAX_LOG_RATIO, log_ratio
from spmdrl.algorithms.masked import Stats, check_positive, keep, masked_mean
from spmdrl.errors import Refusal

Loss = tuple[Tensor, Stats]


def pairs_in_loss(chosen_lengths: Tensor, rejected_lengths: Tensor) -> Tensor:
    """Return [P] bool, whether both responses have loss tokens. These pairs are in the loss."""
    return (chosen_lengths > 0) & (rejected_lengths > 0)


def extend_linearly(curve: Callable[[Tensor], Tensor], exponent: Tensor) -> Tensor:
    """Return e^x or e^x - 1, continued above x = 20 by its tangent: finite, with a gradient.

    Args:
        curve: torch.exp or torch.expm1.
        exponent: x.
    """
    over = (exponent - MAX_LOG_RATIO).clamp(min=0)
    return curve(exponent.clamp(max=MAX_LOG_RATIO)) + math.exp(MAX_LOG_RATIO) * over


@dataclass(frozen=True)
class Pairs:
    """P pairs of responses. Each sequence has two [P] tensors: of the chosen and the rejected."""

    logps: Sequence[Tensor]
    lengths: Sequence[Tensor]
    log_ratios: Sequence[Tensor]
    """rho, or log pi without a reference; 0 for pairs that are not in the loss."""
    beta: float = 1.0

    @cached_property
    def in_loss(self) -> Tensor:
        """[P] bool, whether the pair is in the loss."""
        return pairs_in_loss(*self.lengths)

    def per_token(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Divide each side's values by its lengths."""
        return [v / n.clamp(min=1) for v, n in zip(values, self.lengths)]

    def rewards(self, values: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return beta times each side's values; None: the log-ratios."""
        return [self.beta * v for v in (self.log_ratios if values is None else values)]

    def loss(self, terms: Tensor, rewards: Sequence[Tensor] | None = None) -> Loss:
        """Return the terms of the pairs in the loss, and the stats that all losses report.

        Args:
            terms: [P] float.
            rewards: of each side, [P] float; None: beta times the log-ratios.
        """
        rewards = rewards or self.rewards()
        in_loss = self.in_loss
        margin = rewards[0].detach() - rewards[1].detach()
        stats = {
            "preference/accuracy": masked_mean((margin.sign() + 1) / 2, in_loss),
            "preference/margin": masked_mean(margin, in_loss),
        }
        for i, side in enumerate(("chosen", "rejected")):
            num_tokens = keep(self.lengths[i].double(), in_loss).sum()
            stats[f"preference/{side}_reward"] = masked_mean(rewards[i], in_loss)
            stats[f"preference/{side}_logprob"] = (
                masked_mean(self.logps[i], in_loss)[0],
                num_tokens,
            )
        return keep(terms, in_loss), stats


def pairs_without_reference(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
) -> Pairs:
    """Return pairs to compare by log pi alone; see the package for the inputs."""
    logps = (chosen_logps, rejected_logps)
    lengths = (chosen_lengths, rejected_lengths)
    in_loss = pairs_in_loss(*lengths)
    return Pairs(logps, lengths, [keep(side, in_loss) for side in logps])


def pairs_with_reference(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 1.0,
) -> Pairs:
    """Return pairs to compare by log pi / pi_ref; see the package for the inputs.

    Args:
        beta: above 0; the rewards in the stats are beta rho.
    Raises: Refusal for beta out of range.
    """
    check_positive(beta=beta)
    logps = (chosen_logps, rejected_logps)
    lengths = (chosen_lengths, rejected_lengths)
    in_loss = pairs_in_loss(*lengths)
    refs = (ref_chosen_logps, ref_rejected_logps)
    # Not clamped as for tokens: sums over a response are often beyond +-20.
    rho = [log_ratio(side, ref, in_loss) for side, ref in zip(logps, refs)]
    return Pairs(logps, lengths, rho, beta)


def check_smoothing(rate: float) -> None:
    """Raise Refusal for a share of flipped labels outside [0, 0.5)."""
    if not 0 <= rate < 0.5:
        raise Refusal(f"label_smoothing: must be in [0, 0.5), got {rate}")


def smoothed_loss(margin: Tensor, rate: float) -> Tensor:
    """Return -log sigma(margin) with a share of the labels flipped: [P], nats.

    Args:
        rate: the share.
    Raises: Refusal for a rate outside [0, 0.5).
    """
    check_smoothing(rate)
    return -(1 - rate) * logsigmoid(margin) - rate * logsigmoid(-margin)
