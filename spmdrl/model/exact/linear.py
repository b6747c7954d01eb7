"""Matrix products whose rows have the same bits in every batch.

A library chooses how it cuts a product by the number of rows, and with it the order of the sums.
Where that number is a multiple of ROWS, a row's bits depend on the row alone: on no other row, nor
on their number. The last rows of a product are padded to such a number. That the library behaves
so is tried once for each shape, at its first product; where it does not, all products of the shape
have BLOCK rows. Rows begin at aligned places in memory, on which bits may also depend.

Shape letters: M rows, K inputs, N outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.errors import Refusal

ROWS = 16
"""The number of rows of a product is a multiple of this."""
BLOCK = 64
"""Rows of each product of a shape whose bits depend on the number of rows."""
_COUNTS = (16, 32, 48, 80, 112, 144, 272)
"""Numbers of rows that a shape is tried with."""
_SHIFT = 5
"""Rows by which the place of a row in two products differs there."""


def padded_rows(count: int) -> int:
    """Return the least multiple of ROWS that is at least `count`."""
    return -(-count // ROWS) * ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a weight, as F.linear does, each with the bits that it has in any batch.

    The backward pass is that of F.linear.

    Args:
        x: [.., K]. weight: [N, K]. bias: [N] or None. All of one dtype.
    Returns: [.., N].
    Raises: Refusal for a shape for which that cannot be had on this machine.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if missing := -x.shape[-1] % ROWS:
        rows = F.pad(rows, (0, missing))
        weight = F.pad(weight, (0, missing))
    threads = torch.get_num_threads()
    unit = _unit(weight.shape[1], weight.shape[0], x.dtype, bias is not None, threads)
    if unit == ROWS and len(rows) % ROWS == 0:
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
    """Return [M, N]: one product of the most rows that are a multiple of ROWS, or products of BLOCK
    rows; and one of the rows that are left, padded."""
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
def _unit(inputs: int, outputs: int, dtype: torch.dtype, has_bias: bool, threads: int) -> int:
    """Return the multiple of which a shape's products have rows: ROWS or BLOCK.

    Raises: Refusal where neither keeps the bits of rows.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        rows = torch.randn(_SHIFT + max(_COUNTS), inputs).to(dtype)
        # Weights of a model begin at any place in memory.
        values = torch.randn(outputs * inputs + 1).to(dtype)
        weight = values[1:].view(outputs, inputs)
        bias = torch.randn(outputs).to(dtype) if has_bias else None
    for unit in (ROWS, BLOCK):
        if _keeps_bits(rows, weight, bias, unit=unit):
            return unit
    raise Refusal(
        f"engine.exact: products of {inputs} inputs and {outputs} outputs in {dtype} have other "
        f"bits in other batches on this CPU with {threads} threads; set it to false"
    )


@torch.no_grad()
def _keeps_bits(rows: Tensor, weight: Tensor, bias: Tensor | None, *, unit: int) -> bool:
    """Return whether rows have the same bits in products of other sizes and at other places."""
    whole = _product(rows, weight, bias, unit=unit)
    aligned = weight.clone()
    for count in (1, *_COUNTS):
        part = slice(_SHIFT, _SHIFT + count)
        if not torch.equal(_product(rows[part], aligned, bias, unit=unit), whole[part]):
            return False
    return True
