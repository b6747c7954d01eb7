"""What the preference losses share: the pairs in the loss, log-ratios, the stats."""

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
    """Return [P] bool: both responses have loss tokens. Their number divides the loss."""
    return (chosen_lengths > 0) & (rejected_lengths > 0)


def capped(curve: Callable[[Tensor], Tensor], exponent: Tensor) -> Tensor:
    """Return e^x (torch.exp) or e^x - 1 (torch.expm1), and above x = 20 its tangent there: finite,
    with a gradient that does not end."""
    over = (exponent - MAX_LOG_RATIO).clamp(min=0)
    return curve(exponent.clamp(max=MAX_LOG_RATIO)) + math.exp(MAX_LOG_RATIO) * over


@dataclass(frozen=True)
class Pairs:
    """P pairs as a loss compares them; [P] tensors (of the chosen, of the rejected)."""

    logps: Sequence[Tensor]
    lengths: Sequence[Tensor]
    own: Sequence[Tensor]
    """log pi, or rho where there is a reference; 0 for pairs that are not in the loss."""
    beta: float = 1.0

    @cached_property
    def kept(self) -> Tensor:
        """What is in the loss, [P] bool."""
        return pairs_in_loss(*self.lengths)

    def per_token(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Divide each side's values by its lengths."""
        return [v / n.clamp(min=1) for v, n in zip(values, self.lengths)]

    def scaled(self, values: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return beta times each side's values; of `own`, if none are given."""
        return [self.beta * v for v in (self.own if values is None else values)]

    def loss(self, terms: Tensor, rewards: Sequence[Tensor] | None = None) -> Loss:
        """Return the terms of the pairs in the loss, and the package's stats.

        Args:
            terms: [P] float.
            rewards: of each side, [P] float; None for beta `own`.
        """
        rewards = rewards or self.scaled()
        kept = self.kept
        margin = rewards[0].detach() - rewards[1].detach()
        stats = {
            "preference/accuracy": masked_mean((margin.sign() + 1) / 2, kept),
            "preference/margin": masked_mean(margin, kept),
        }
        for i, side in enumerate(("chosen", "rejected")):
            num_tokens = keep(self.lengths[i].double(), kept).sum()
            stats[f"preference/{side}_reward"] = masked_mean(rewards[i], kept)
            stats[f"preference/{side}_logprob"] = (masked_mean(self.logps[i], kept)[0], num_tokens)
        return keep(terms, kept), stats


def pairs_of(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
) -> Pairs:
    """Compare pairs without a reference; see the package for the inputs."""
    logps = (chosen_logps, rejected_logps)
    lengths = (chosen_lengths, rejected_lengths)
    kept = pairs_in_loss(*lengths)
    return Pairs(logps, lengths, [keep(side, kept) for side in logps])


def compared(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 1.0,
) -> Pairs:
    """Compare pairs with a reference; see the package for the inputs.

    Args:
        beta: above 0; the rewards of the stats are beta rho.
    Raises: Refusal for beta out of range.
    """
    check_positive(beta=beta)
    logps = (chosen_logps, rejected_logps)
    lengths = (chosen_lengths, rejected_lengths)
    kept = pairs_in_loss(*lengths)
    refs = (ref_chosen_logps, ref_rejected_logps)
    # Not clamped as a token's: sums over a response are often beyond 20.
    rho = [log_ratio(side, ref, kept) for side, ref in zip(logps, refs)]
    return Pairs(logps, lengths, rho, beta)


def check_smoothing(rate: float) -> None:
    """Raises: Refusal for a share of flipped labels that is none, or above a half."""
    if not 0 <= rate < 0.5:
        raise Refusal(f"label_smoothing: must be in [0, 0.5), got {rate}")


def smoothed(margin: Tensor, rate: float) -> Tensor:
    """Return -log sigma(margin), with labels that are flipped at a rate: [P], nats.

    Raises: Refusal for a rate out of [0, 0.5).
    """
    check_smoothing(rate)
    return -(1 - rate) * logsigmoid(margin) - rate * logsigmoid(-margin)
