"""Matrix products whose rows have the same bits in every batch.

The last rows of a product are padded to the unit of its shape (units.py). Where no unit keeps the
bits of rows, all products of the shape have BLOCK rows.

Shape letters: M rows, K inputs, N outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.exact.units import ALIGNED, TRIED_ROWS, UNITS, least_unit

BLOCK = 64
"""Rows of each product of a shape whose bits depend on the number of rows."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a weight, as F.linear does, each with the bits that it has in any batch.

    The backward pass is that of F.linear.

    Args:
        x: [.., K]. weight: [N, K]. bias: [N] or None. All of one dtype.
    Returns: [.., N].
    Raises: Refusal for a shape for which that cannot be had on this machine.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if missing := -x.shape[-1] % ALIGNED:
        rows = F.pad(rows, (0, missing))
        weight = F.pad(weight, (0, missing))
    threads = torch.get_num_threads()
    inputs = weight.shape[1]
    unit = _unit(inputs, len(weight), x.dtype, bias is not None, threads, x.device)
    if unit != BLOCK and len(rows) % unit == 0:
        out = F.linear(rows, weight, bias)
    elif torch.is_grad_enabled():
        out = _Linear.apply(rows, weight, bias, unit)
    else:
        out = _product(rows, weight, bias, unit=unit)
    return out.view(*x.shape[:-1], len(weight))


def grouped_linear(x: Tensor, weights: Tensor, *, ends: Tensor) -> Tensor:
    """Multiply rows that are sorted by expert, each by the weight of its expert; see `linear`.

    Args:
        x: [M, K]. weights: [E, K, N]. ends: [E] integers, where each expert's rows end.
    Returns: [M, N]; zeros for rows of no expert, which come last.
    """
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    left = len(x) - sum(counts)
    *parts, rest = x.split([*counts, left])
    found = [linear(part, weight.t()) for part, weight in zip(parts, weights.unbind())]
    return torch.cat([*found, rest.new_zeros(left, weights.shape[-1])])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, bias: Tensor | None, unit: int) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias, unit=unit)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weight = ctx.saved_tensors
        of_rows = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = grad.t() @ rows if ctx.needs_input_grad[1] else None
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return of_rows, of_weight, of_bias, None


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, *, unit: int) -> Tensor:
    """Return [M, N]: one product of the most rows that are a multiple of the unit, or products of
    BLOCK rows; and one of the rows that are left, padded."""
    out = rows.new_empty(len(rows), len(weight))
    for begin, end in _cuts(len(rows), unit):
        _multiply(rows[begin:end], weight, bias, out=out[begin:end])
    left = len(rows) % unit
    if left:
        last = F.pad(rows[-left:], (0, 0, 0, unit - left))
        out[-left:] = F.linear(last, weight, bias)[:left]
    return out


def _cuts(count: int, unit: int) -> Iterator[tuple[int, int]]:
    whole = count - count % unit
    size = BLOCK if unit == BLOCK else max(whole, 1)
    for begin in range(0, whole, size):
        yield begin, begin + size


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


@cache
@torch.no_grad()
def _unit(
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    has_bias: bool,
    threads: int,
    device: torch.device,
) -> int:
    """Return the multiple of which a shape's products have rows: a unit, or BLOCK.

    Raises: Refusal where none keeps the bits of rows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rows = torch.randn(TRIED_ROWS, inputs).to(device, dtype)
        # Weights of a model begin at any place in memory.
        values = torch.randn(outputs * inputs + 1).to(device, dtype)
        weight = values[1:].view(outputs, inputs)
        bias = torch.randn(outputs).to(device, dtype) if has_bias else None
    aligned = weight.clone()

    def compute(own: Tensor, unit: int) -> Tensor:
        is_whole = len(own) == TRIED_ROWS
        return _product(own, weight if is_whole else aligned, bias, unit=unit)

    what = f"{inputs} inputs and {outputs} outputs"
    return least_unit((*UNITS, BLOCK), compute, rows, what=what, threads=threads)
