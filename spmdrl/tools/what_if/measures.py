"""Measures that compare methods: angles of gradients, effective sample size, disagreement.

Pure functions, in float64. M methods, S samples, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]
"""{parameter: its gradient}. A parameter that is missing has gradient 0."""


def cosine(one: Gradients, other: Gradients) -> float:
    """Return the cosine of the angle between two gradients, each as one long vector.

    Returns: in [-1, 1]; NaN if either gradient is 0 or not finite.
    """
    product = sum((_dot(one[name], other[name]) for name in one.keys() & other.keys()), 0.0)
    norms = math.sqrt(_square(one) * _square(other))
    if not (norms > 0 and math.isfinite(norms)):
        return math.nan
    return min(1.0, max(-1.0, product / norms))  # rounding may exceed the range


def _square(gradients: Gradients) -> float:
    return sum((_dot(own, own) for own in gradients.values()), 0.0)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(one.double().flatten() @ other.double().flatten())


def effective_share(weights: Tensor) -> float:
    """Return the effective sample size of weights, as a share of their number.

    (sum w)^2 / (N sum w^2): 1 if all are equal, 1 / N if only one is not 0.

    Args:
        weights: [N] float, at least 0; zeros count in N.
    Returns: in [0, 1]; NaN if no weight is above 0.
    Source: Kish 1965; Kong 1992.
    """
    weights = weights.double()
    squares = weights.square().sum()
    if not squares > 0:
        return math.nan
    return float(weights.sum().square() / (weights.numel() * squares))


def share(chosen: Tensor, among: Tensor) -> float:
    """Return the share of the tokens in `among` [N] bool that are also in `chosen` [N] bool.

    Returns: NaN if `among` has no token.
    """
    count = int(among.sum())
    return int((chosen & among).sum()) / count if count else math.nan


def push_shares(pushes: Tensor) -> Tensor:
    """Return each method's pushes as shares of the sum of their absolute values: [M, S] float64.

    The scale of a method does not matter, because the optimizer or the bound on the gradient norm
    removes it.

    Args:
        pushes: [M, S] float, how much each method raises each sample's summed logprob; negative if
            it lowers it.
    """
    pushes = pushes.double()
    sizes = pushes.abs().sum(1, keepdim=True)
    return torch.where(sizes > 0, pushes / sizes, 0.0)


def disagreement(shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how much the methods disagree on each sample.

    Args:
        shares: see push_shares.
    Returns: the largest difference between two methods, [S] float64 in [0, 2]; and the indices of
        the two, [S] int64 each: of the method with the largest share, and with the smallest.
    """
    high, up = shares.max(0)
    low, down = shares.min(0)
    return high - low, up, down
