"""Measures that compare methods: angles of gradients, evenness of weights, disagreement on samples.

Pure functions, in float64. M methods, S samples, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]
"""{parameter: its gradient}; a parameter that is left out has gradient 0."""


def cosine(one: Gradients, other: Gradients) -> float:
    """Return the cosine of the angle between two gradients, taken as one long vector each.

    Returns: in [-1, 1]; NaN where either is 0 or not finite.
    """
    product = sum((_dot(one[name], other[name]) for name in one.keys() & other.keys()), 0.0)
    norms = math.sqrt(_square(one) * _square(other))
    if not (norms > 0 and math.isfinite(norms)):
        return math.nan
    return min(1.0, max(-1.0, product / norms))  # rounding may lead beyond these


def _square(gradients: Gradients) -> float:
    return sum((_dot(own, own) for own in gradients.values()), 0.0)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(one.double().flatten() @ other.double().flatten())


def effective_share(weights: Tensor) -> float:
    """Return the effective sample size of weights, as a share of their number.

    (sum w)^2 / (N sum w^2): 1 if all are equal, 1 / N if only one is not 0.

    Args:
        weights: [N] float, at least 0; zeros count among the N.
    Returns: in [0, 1]; NaN without a weight above 0.
    Source: Kish 1965; Kong 1992.
    """
    weights = weights.double()
    squares = weights.square().sum()
    if not squares > 0:
        return math.nan
    return float(weights.sum().square() / (weights.numel() * squares))


def share(chosen: Tensor, among: Tensor) -> float:
    """Return the share of the tokens `among` [N] bool that are `chosen` [N] bool; NaN of none."""
    count = int(among.sum())
    return int((chosen & among).sum()) / count if count else math.nan


def push_shares(pushes: Tensor) -> Tensor:
    """Return which share of a method's whole push goes to each sample, [M, S] float64.

    A method's scale says little, since the optimizer or the gradient-norm bound takes it away: so
    each method's pushes are divided by the sum of their sizes.

    Args:
        pushes: [M, S] float, of each method on each sample's summed logprob; above 0 raises it.
    """
    pushes = pushes.double()
    sizes = pushes.abs().sum(1, keepdim=True)
    return torch.where(sizes > 0, pushes / sizes, 0.0)


def disagreement(shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return on which samples methods disagree.

    Args:
        shares: see push_shares.
    Returns: by how much the two methods that differ most differ, [S] float64 in [0, 2]; and which
        these are, [S] int64 each: the one that pushes up more, the one that pushes down more.
    """
    high, up = shares.max(0)
    low, down = shares.min(0)
    return high - low, up, down
