"""Check the form of a method's result, from a call on a few tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

PAIR_KINDS = ("preference", "reward_model")
"""Kinds of losses that compare pairs."""
_WITH_GRADIENT = ("loss", "preference", "reward_model", "distillation")


def form_problem(kind: str, result: Any, *, name: str, is_per_token: bool) -> str:
    """Return what is wrong with a result; empty if nothing is.

    Args:
        kind: kind of the method, see `registry`.
        name: name of the method, for messages.
        is_per_token: whether the method is an advantage that is computed per token.
    """
    tensor = result
    what = "a tensor"
    each = "token"
    if kind != "kl" and (kind != "advantage" or is_per_token):
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not (is_pair and (is_per_token or isinstance(result[1], dict))):
            second = "returns or None" if is_per_token else "stats dict"
            return f"{name} must return ([T] tensor, {second}), got {type(result).__name__}"
        tensor = result[0]
        what = "as its first value a tensor"
    if kind in PAIR_KINDS:
        each = "pair or response"
    elif kind == "advantage" and not is_per_token:
        each = "sequence"
    count = 3 if each == "token" else 2
    if not isinstance(tensor, Tensor) or tensor.shape != (count,):
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        return f"{name} must return {what} of one value per {each}, got {shape} for {count}"
    if not (tensor.is_floating_point() or kind == "advantage"):
        return f"{name} must return {what} of floating point, got {tensor.dtype}"
    if not tensor.isfinite().all():
        return f"{name} returned {tensor.tolist()} for {count} {each}s: every value must be finite"
    if kind in _WITH_GRADIENT and not tensor.requires_grad:
        return (
            f"{name} returns terms without a gradient, so that nothing would be learnt: they must "
            "depend on outputs of the model (logprobs, entropy, logps, scores or logits), "
            "without detach(), item() or torch.no_grad()"
        )
    if tensor is result or is_per_token:
        return ""
    return _stats_problem(result[1], name=name)


def _stats_problem(stats: dict, *, name: str) -> str:
    for statistic, value in stats.items():
        if not isinstance(statistic, str):
            return f"{name}: names of statistics are texts, got {statistic!r}"
        if not (isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))):
            return (
                f"{name}: the statistic {statistic!r} must be (sum, count), two tensors of one "
                "number, [], which are added up over micro-batches and ranks and then divided; got "
                f"{_describe(value)}"
            )
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return f"{value!r:.60}"
