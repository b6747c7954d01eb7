"""What the preference losses share: the mask of pairs, sums for the stats, stable logs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Stats = dict[str, tuple[Tensor, Tensor]]


def pairs_in_loss(chosen_lengths: Tensor, rejected_lengths: Tensor) -> Tensor:
    """Return [P] bool: both responses have loss tokens. Their number divides the loss."""
    return (chosen_lengths > 0) & (rejected_lengths > 0)


def keep(values: Tensor, kept: Tensor) -> Tensor:
    """Return values where kept, exactly 0 elsewhere."""
    # where, not a product: NaN * 0 is NaN, and so would be the gradient.
    return torch.where(kept, values, 0.0)


def log_ratio_of(logps: Tensor, ref_logps: Tensor, kept: Tensor) -> Tensor:
    """Return log pi / pi_ref of the sequences kept, 0 elsewhere; the reference is constant."""
    # No clamp as on a token's log-ratio: sums over a response are often beyond 20.
    return keep(logps - ref_logps.detach(), kept)


def log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0 without loss of digits, as is its gradient."""
    # Each form keeps its digits on its own side of -ln 2; inputs stay on that side, since an
    # infinite gradient of the form not taken would come back as NaN.
    near, far = values.clamp(min=-math.log(2)), values.clamp(max=-math.log(2))
    return torch.where(values > -math.log(2), (-near.expm1()).log(), (-far.exp()).log1p())


def masked_mean(values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean's numerator and denominator: detached float64 scalars."""
    return keep(values.detach(), kept).double().sum(), kept.double().sum()


def pair_stats(
    rewards: tuple[Tensor, Tensor], logps: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]
) -> Stats:
    """Compute the package's stats from [P] tensors, each (of the chosen, of the rejected)."""
    kept = pairs_in_loss(*lengths)
    margin = rewards[0].detach() - rewards[1].detach()
    stats = {
        "preference/accuracy": masked_mean((margin.sign() + 1) / 2, kept),
        "preference/margin": masked_mean(margin, kept),
    }
    for i, side in enumerate(("chosen", "rejected")):
        num_tokens = keep(lengths[i].double(), kept).sum()
        stats[f"preference/{side}_reward"] = masked_mean(rewards[i], kept)
        stats[f"preference/{side}_logprob"] = (masked_mean(logps[i], kept)[0], num_tokens)
    return stats


def check_beta(beta: float) -> None:
    """Raise ValueError unless beta is above 0."""
    if not beta > 0:
        raise ValueError(f"beta: must be above 0, got {beta}")


def check_weight(name: str, weight: float) -> None:
    """Raise ValueError, with the option's name, for a negative weight."""
    if not weight >= 0:
        raise ValueError(f"{name}: must be at least 0, got {weight}")
