"""Helpers of all methods: masked values, stats, and checks of options."""

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
"""{name: (numerator, denominator)}, detached float64 scalars.

Add numerators and denominators over micro-batches and ranks, then divide.
"""
Method = TypeVar("Method", bound=Callable[..., Any])


def attach(**attributes: Any) -> Callable[[Method], Method]:
    """Attach attributes to a method that its signature cannot hold.

    Attributes:
        statistics: a function that computes scalars of the whole batch for the method. It takes, by
            name, [N] columns of the loss tokens of the whole batch (all ranks; N may be 0), and the
            options that it shares with the method. It returns {input name: [] float64}. The method
            gets these for every micro-batch. The columns are those at the batch's start, so the
            scalars stay the same during all updates of the batch. Invariant under: permuting the
            columns, bit for bit.
        matched: a function that computes inputs of a preference loss from all pairs of the batch.
            It takes [P] inputs of all pairs by name; inputs with a gradient have their values at
            the batch's start. It returns {input name: [P]}, of which each micro-batch gets its
            entries. Permuting the pairs permutes the result.
        aggregations: the aggregations under which the loss is the objective of its paper. Others
            are refused: the terms belong to whole sequences, and an aggregation over tokens would
            weigh them by length.
        totals: a function that computes sums over the whole batch for a per-token advantage. It
            is called for each micro-batch and returns {name: tensor}; these are added up over the
            micro-batches of all dp ranks, so their shapes must not depend on the micro-batch. It
            may take any input of the method, and also `sequence_ids` [S] int64, the rows in the
            whole batch (-1: a dummy without tokens), `num_sequences` B, `num_groups` P and
            `num_positions` L, the number of loss tokens of the longest response. The method gets
            the sums by name.
        per_sequence: a function that computes inputs of a per-token advantage for each sequence of
            the whole batch. It takes those sums, the [B] tensors of `types.Scalars`, and
            `loss_lengths` [B] int64, loss tokens. It returns {name: [B, ...]}, of which each
            micro-batch gets the rows of its sequences.
        is_whitened: the result is whitened over all loss tokens of the global batch.
    """

    def decorate(function: Method) -> Method:
        vars(function).update(attributes)
        return function

    return decorate


def derive(**builders: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compute some of a method's parameters from others, which its callers pass instead.

    `@derive(groups=group_rewards)` on `def grpo(groups, *, std_eps=1e-6)` makes a method
    grpo(rewards, group_ids, *, is_valid, std_eps=1e-6). So methods with the same inputs declare
    them once, in the builder. The signature of the result has the parameters that callers pass. If
    builder and method have a parameter of the same name, both get it, with the method's default.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        method_signature = inspect.signature(method, eval_str=True)
        signatures = {n: inspect.signature(one, eval_str=True) for n, one in builders.items()}
        parameters: dict[str, inspect.Parameter] = {}
        for one in (*signatures.values(), method_signature):
            parameters |= one.parameters
        for name in builders:
            del parameters[name]
        ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
        signature = method_signature.replace(parameters=ordered)

        @functools.wraps(method)
        def build_and_call(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            values = bound.arguments
            for name, builder in builders.items():
                values[name] = builder(**{n: values[n] for n in signatures[name].parameters})
            return method(**{n: values[n] for n in method_signature.parameters})

        build_and_call.__signature__ = signature  # type: ignore[attr-defined]
        build_and_call.__annotations__ = {n: p.annotation for n, p in parameters.items()}
        return build_and_call

    return decorate


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values where the mask is true; elsewhere exactly 0, without a gradient."""
    # Not a product: NaN * 0 is NaN, in the value and in the gradient.
    return torch.where(mask, values, 0.0)


def masked_mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the count of the values where the mask is true, as in Stats."""
    return keep(values.detach(), mask).double().sum(), mask.double().sum()


def log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0. Neither the value nor the gradient loses digits."""
    # There are two formulas, each accurate on its side of -ln 2. Inputs are clamped to that side:
    # an infinite gradient of the formula that is not chosen would become NaN.
    near = values.clamp(min=-math.log(2))
    far = values.clamp(max=-math.log(2))
    return torch.where(values > -math.log(2), (-near.expm1()).log(), (-far.exp()).log1p())


def _check(is_right: Callable[[float], bool], what: str) -> Callable[..., None]:
    """Return a function of options by name that raises Refusal for a wrong value."""

    def check(**values: float) -> None:
        for name, value in values.items():
            if not is_right(value):
                raise Refusal(f"{name}: {what}, got {value}")

    return check


check_positive = _check(lambda v: v > 0 and math.isfinite(v), "must be above 0")
check_bound = _check(lambda v: v > 0, "must be above 0")
"""For upper bounds, which may be infinite: then there is no bound."""
check_not_negative = _check(lambda v: v >= 0 and math.isfinite(v), "must be at least 0")
check_unit = _check(lambda v: 0 <= v <= 1, "must be in [0, 1]")
check_share = _check(lambda v: 0 < v <= 1, "a share, must be above 0 and at most 1")
