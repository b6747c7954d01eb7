"""What every method shares: masked values, stats, and checks of options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Stats = dict[str, tuple[Tensor, Tensor]]
"""{name: (numerator, denominator)}, detached float64 scalars: add up pairwise, then divide."""
Method = TypeVar("Method", bound=Callable[..., Any])


def attach(**attributes: Any) -> Callable[[Method], Method]:
    """Say of a method what the program has to know besides its signature."""

    def to(function: Method) -> Method:
        vars(function).update(attributes)
        return function

    return to


def keep(values: Tensor, kept: Tensor) -> Tensor:
    """Return values with exactly 0, and no gradient, where they are not kept."""
    # where, not a product: NaN * 0 is NaN, and so would be the gradient.
    return torch.where(kept, values, 0.0)


def masked_mean(values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and count of the values kept, detached float64 scalars."""
    return keep(values.detach(), kept).double().sum(), kept.double().sum()


def log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0 without loss of digits, as is its gradient."""
    # Each form keeps its digits on its own side of -ln 2; inputs stay on that side, since an
    # infinite gradient of the form not taken would come back as NaN.
    near, far = values.clamp(min=-math.log(2)), values.clamp(max=-math.log(2))
    return torch.where(values > -math.log(2), (-near.expm1()).log(), (-far.exp()).log1p())


def check_positive(**values: float) -> None:
    """Raise ValueError for an option that is not a finite number above 0."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: must be above 0, got {value}")


def check_bound(**values: float) -> None:
    """Raise ValueError for an upper bound that is not above 0; infinity bounds nothing."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}: must be above 0, got {value}")


def check_not_negative(**values: float) -> None:
    """Raise ValueError for an option that is not a finite number of at least 0."""
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}: must be at least 0, got {value}")


def check_unit(**values: float) -> None:
    """Raise ValueError for an option outside [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: must be in [0, 1], got {value}")


def check_share(**values: float) -> None:
    """Raise ValueError for an option that is not a share of the tokens."""
    for name, value in values.items():
        if not 0 < value <= 1:
            raise ValueError(f"{name}: a share, must be above 0 and at most 1, got {value}")
