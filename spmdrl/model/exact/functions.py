"""torch's functions whose bits depend on a tensor's size, replaced while a model computes.

torch computes the last elements of a tensor, those that fill no vector, by other code than the
rest. For most functions both give the same bits; for those here they do not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spmdrl.model.exact.linear import grouped_linear, linear
from spmdrl.world.torch_internals import GROUPED_MM


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), computed in float32, in the dtype of x."""
    return _Elementwise.apply(x, _sigmoid, _sigmoid_gradient)


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Return x / (1 + exp(-x)), computed in float32, in the dtype of x."""
    return _Elementwise.apply(x, _silu, torch.ops.aten.silu_backward)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of x, computed in float32, in the dtype of x."""
    if approximate == "none":
        return F.gelu(x)
    return _Elementwise.apply(x, _gelu_tanh, _gelu_gradient)


def _sigmoid(values: Tensor) -> Tensor:
    return values.neg().exp_().add_(1).reciprocal_()


def _sigmoid_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward(grad, torch.ops.aten.sigmoid(x))


def _silu(values: Tensor) -> Tensor:
    divisor = values.neg().exp_().add_(1)
    return torch.div(values, divisor, out=divisor)


def _gelu_tanh(values: Tensor) -> Tensor:
    cubed = values + 0.044715 * (values * values * values)
    return 0.5 * values * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubed))


def _gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


class _Elementwise(torch.autograd.Function):
    """A function computed in float32 by one formula, with the gradient of torch's own."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        formula: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return formula(x.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        return ctx.gradient(grad, x), None, None


def _grouped_mm(x: Tensor, weights: Tensor, *, offs: Tensor, **others: Any) -> Tensor:
    assert not any(value is not None for value in others.values()), others
    return grouped_linear(x, weights, ends=offs)


def _addmm(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return linear(rows, weight.t(), bias)


REPLACED: dict[Callable, Callable] = {
    F.linear: linear,
    torch.addmm: _addmm,
    GROUPED_MM: _grouped_mm,
    F.silu: silu,
    F.gelu: gelu,
    torch.sigmoid: sigmoid,
    Tensor.sigmoid: sigmoid,
}
"""{torch's function: one whose bits do not depend on the batch}."""


class ExactFunctions(TorchFunctionMode):
    """Replaces functions of REPLACED inside a `with` block, in this thread."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, or what replaces it."""
        return REPLACED.get(function, function)(*args, **(kwargs or {}))


_thread = threading.local()


def compute_exactly(*modules: nn.Module) -> None:
    """Have the forward of modules compute with the functions that replace torch's.

    Args:
        modules: may be inside each other: a model for its forward pass, and its blocks, which the
            backward pass may run again.
    """
    for module in modules:
        module.forward = _exactly(module.forward)  # type: ignore[method-assign]


def _exactly(forward: Callable) -> Callable:
    @wraps(forward)
    def exact(*args: Any, **options: Any) -> Any:
        if getattr(_thread, "is_inside", False):
            return forward(*args, **options)
        _thread.is_inside = True
        try:
            with ExactFunctions():
                return forward(*args, **options)
        finally:
            _thread.is_inside = False

    return exact
