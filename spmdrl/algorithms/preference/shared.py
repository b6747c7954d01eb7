"""What the preference losses share: the mask of pairs, log-ratios, the stats."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from spmdrl.algorithms.masked import Stats, check_positive, keep, masked_mean


class Side(NamedTuple):
    """One side of P pairs."""

    logps: Tensor
    ref_logps: Tensor
    lengths: Tensor


def pairs_in_loss(chosen_lengths: Tensor, rejected_lengths: Tensor) -> Tensor:
    """Return [P] bool: both responses have loss tokens. Their number divides the loss."""
    return (chosen_lengths > 0) & (rejected_lengths > 0)


def log_ratio_of(logps: Tensor, ref_logps: Tensor, kept: Tensor) -> Tensor:
    """Return log pi / pi_ref of the sequences kept, 0 elsewhere; the reference is constant."""
    # No clamp as on a token's log-ratio: sums over a response are often beyond 20.
    return keep(logps - ref_logps.detach(), kept)


def compared(
    chosen: Side, rejected: Side, *, beta: float, per_token: bool = False
) -> tuple[Tensor, Tensor, Tensor, Stats]:
    """Return rho of both sides [P], the mask of pairs in the loss [P], and the stats.

    Args:
        beta: above 0; the rewards of the stats are beta rho.
        per_token: divide each rho by its length.
    Raises: ValueError for beta out of range.
    """
    check_positive(beta=beta)
    kept = pairs_in_loss(chosen.lengths, rejected.lengths)
    rho = [log_ratio_of(side.logps, side.ref_logps, kept) for side in (chosen, rejected)]
    if per_token:
        rho = [r / side.lengths.clamp(min=1) for r, side in zip(rho, (chosen, rejected))]
    stats = pair_stats(
        (beta * rho[0], beta * rho[1]),
        (chosen.logps, rejected.logps),
        (chosen.lengths, rejected.lengths),
    )
    return *rho, kept, stats


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
