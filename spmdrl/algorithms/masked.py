"""What every method shares: masked values, stats, and checks of options."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from spmdrl.errors import Refusal

Stats = dict[str, tuple[Tensor, Tensor]]
"""{name: (numerator, denominator)}, detached float64 scalars: add up pairwise, then divide."""
Method = TypeVar("Method", bound=Callable[..., Any])


def attach(**attributes: Any) -> Callable[[Method], Method]:
    """Attach to a method what its signature does not say.

    statistics: the function that gives it its whole-batch scalars. That takes, by name, [N] columns
        of the loss tokens of the whole batch (all ranks; N may be 0) and those of the method's
        options that matter to it, and returns {input name: [] float64}, to be passed to the method
        for every micro-batch. Its columns are those of the batch's start: computed once, the
        scalars do not move during the batch's updates. Invariant under: permuting the columns, bit
        for bit.
    matched: the function that gives a preference loss what it asks for of the other pairs of the
        batch. That takes, by name, [P] inputs of all pairs of the batch, those with gradient as
        they were at its start, and returns {input name: [P]}, and each micro-batch gets its own
        entries. Permuting the pairs permutes what it returns.
    aggregations: which of them make it the objective of its paper; others are refused. For terms
        that are a sequence's, which an aggregation over tokens would weigh by its length.
    totals: the function that gives a per-token advantage sums over the whole batch. Of one
        micro-batch it returns {name: tensor} of one shape on every micro-batch, to be added up over
        those of all dp ranks. It may ask for what the method may, and for `sequence_ids` [S] int64,
        rows in the whole batch (-1: a dummy without tokens), and the numbers `num_sequences` B,
        `num_groups` P, `num_positions` L, most loss tokens of a response. The method gets the sums
        by name, whole.
    per_sequence: the function that gives such an advantage, from those sums, the [B] tensors of
        `types.Scalars` and `loss_lengths` [B] int64, loss tokens: {name: [B, ...]}. The method gets
        by name the rows of its micro-batch's sequences.
    whitened: its result is whitened over all loss tokens of the global batch.
    """

    def to(function: Method) -> Method:
        """Note it on the function."""
        vars(function).update(attributes)
        return function

    return to


def making(**makers: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make some of a method's parameters from others, which its callers give instead.

    `@making(groups=group_rewards)` above `def grpo(groups, *, std_eps=1e-6)` is a method
    grpo(rewards, group_ids, *, is_valid, std_eps=1e-6): what methods have in common is written
    once, and each says what is its own. The signature shows what callers give; where maker and
    method have a parameter of one name, both get it, and the method's default counts.
    """

    def to(method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes what the makers ask for."""
        own = inspect.signature(method, eval_str=True)
        asked = {n: inspect.signature(maker, eval_str=True) for n, maker in makers.items()}
        given = {p.name: p for one in (*asked.values(), own) for p in one.parameters.values()}
        given = {name: p for name, p in given.items() if name not in makers}
        signature = own.replace(parameters=sorted(given.values(), key=lambda p: p.kind))

        @functools.wraps(method)
        def called(*args: Any, **options: Any) -> Any:
            """Make what the makers give, and call the method."""
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            values = bound.arguments
            for name, maker in makers.items():
                values[name] = maker(**{n: values[n] for n in asked[name].parameters})
            return method(**{n: values[n] for n in own.parameters})

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {name: p.annotation for name, p in given.items()}
        return called

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
    near = values.clamp(min=-math.log(2))
    far = values.clamp(max=-math.log(2))
    return torch.where(values > -math.log(2), (-near.expm1()).log(), (-far.exp()).log1p())


def _check(is_right: Callable[[float], bool], what: str) -> Callable[..., None]:
    """Return what raises Refusal for options, by name, that are not what they must be."""

    def check(**values: float) -> None:
        for name, value in values.items():
            if not is_right(value):
                raise Refusal(f"{name}: {what}, got {value}")

    return check


check_positive = _check(lambda v: v > 0 and math.isfinite(v), "must be above 0")
check_bound = _check(lambda v: v > 0, "must be above 0")
"""An upper bound: infinity bounds nothing."""
check_not_negative = _check(lambda v: v >= 0 and math.isfinite(v), "must be at least 0")
check_unit = _check(lambda v: 0 <= v <= 1, "must be in [0, 1]")
check_share = _check(lambda v: 0 < v <= 1, "a share, must be above 0 and at most 1")
