"""The value model's loss, and how well its values explain the returns.

Conventions are those of `losses`: where `loss_mask` [T] is False, terms and gradients are exactly 0
for any input. Terms are not divided by a count. Stats are {name: (numerator, denominator)},
detached float64 sums over loss tokens, to be added up over micro-batches and dp ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.algorithms.masked import Stats, keep, masked_mean
from spmdrl.errors import Refusal

__all__ = ["value_loss"]

_ROUNDING = 2.0**-40  # variance / mean square below which returns count as equal


def value_loss(
    values: Tensor, old_values: Tensor, *, returns: Tensor, loss_mask: Tensor, clip: float = 0.2
) -> tuple[Tensor, Stats]:
    """Clip the change of the value: max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2.

    Args:
        values: [T] float, task units. Current, with gradient.
        old_values: [T] float, task units. At batch preparation.
        returns: [T] float, task units. Targets.
        loss_mask: [T] bool.
        clip: a change of the value beyond this does not lower the loss, task units; 0 is off.
    Returns: terms [T] in the dtype of `values`, and stats: value/mean, value/clip_frac and
        those of `explained_variance_sums` for old_values, from which the advantages come.
    Raises: Refusal for a negative clip.
    Source: Schulman et al. 2017, PPO (openai/baselines ppo2), value clipping.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    if not clip >= 0:
        raise Refusal(f"clip: must be at least 0 (0 is off), got {clip}")
    current = keep(values, loss_mask)
    old = keep(old_values.detach(), loss_mask).to(values.dtype)
    targets = keep(returns.detach(), loss_mask).to(values.dtype)
    squares = (current - targets).square()
    is_clipped = torch.zeros_like(loss_mask)
    if clip:
        clipped = (torch.clamp(current, old - clip, old + clip) - targets).square()
        is_clipped = clipped.detach() > squares.detach()
        squares = torch.maximum(squares, clipped)
    stats = {
        "value/mean": masked_mean(values, loss_mask),
        "value/clip_frac": masked_mean(is_clipped, loss_mask),
        **explained_variance_sums(old_values, returns, loss_mask=loss_mask),
    }
    return keep(0.5 * squares, loss_mask), stats


def explained_variance_sums(values: Tensor, returns: Tensor, *, loss_mask: Tensor) -> Stats:
    """Compute the sums that `explained_variance` needs, over one micro-batch.

    Args:
        values, returns: [T] float, task units. loss_mask: [T] bool.
    Returns: value/returns, value/returns_square, value/error and value/error_square. The error is
        returns - values.
    """
    targets = returns.detach().double()
    errors = targets - values.detach().double()
    return {
        "value/returns": masked_mean(targets, loss_mask),
        "value/returns_square": masked_mean(targets.square(), loss_mask),
        "value/error": masked_mean(errors, loss_mask),
        "value/error_square": masked_mean(errors.square(), loss_mask),
    }


def explained_variance(sums: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over all tokens in the sums.

    Args:
        sums: by the names of `explained_variance_sums`, added up over micro-batches and ranks.
    Returns: share of the returns' variance that the values explain, at most 1. It is negative if
        the values are worse than a constant, and NaN without tokens or if all returns are equal
        (a standard deviation below 1e-6 of their root mean square).
    Source: as logged by openai/baselines; population variances.
    """
    count = float(sums["value/returns"][1])
    if not count:
        return float("nan")

    def moments(name: str) -> tuple[float, float]:
        mean = float(sums[name][0]) / count
        square = float(sums[f"{name}_square"][0]) / count
        return max(square - mean * mean, 0.0), square

    variance, square = moments("value/returns")
    if not variance > _ROUNDING * square:
        return float("nan")
    return 1 - moments("value/error")[0] / variance
