"""Of how many rows a library's products must be, so that a row has the same bits in all of them.

A library chooses how it cuts a product by the number of rows, and with it the order of the sums.
Where that number is a multiple of a unit, a row's bits depend on the row alone: on no other row,
nor on their number. Which unit serves is tried on the machine that computes, once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.errors import Refusal

UNITS = (4, 16)
"""Numbers of rows that are tried, the cheapest first."""
ALIGNED = 16
"""Sums within products are padded to a multiple of this, so that rows begin at aligned places."""
KEYS = 128
"""Keys of a block of attention."""
_COUNTS = (1, 4, 8, 12, 20, 28, 36, 48, 80, 144, 272)
"""Numbers of rows that a shape is tried with; they are padded to a unit."""
_SHIFT = 5
"""Rows by which the place of a row in two products differs there."""
TRIED_ROWS = _SHIFT + max(_COUNTS)


def padded(count: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit


def least_unit(
    units: Iterable[int],
    compute: Callable[[Tensor, int], Tensor],
    rows: Tensor,
    *,
    what: str,
    threads: int,
) -> int:
    """Return the first unit for which rows have the same bits in products of all sizes.

    Args:
        compute: returns the products [.., M, N] of rows [.., M, K], padded to a unit.
        rows: [.., TRIED_ROWS, K].
        what: is multiplied, for the message.
    Raises: Refusal when there is none.
    """
    for unit in units:
        whole = compute(rows, unit)
        if all(
            torch.equal(
                compute(rows[..., _SHIFT : _SHIFT + count, :], unit),
                whole[..., _SHIFT : _SHIFT + count, :],
            )
            for count in _COUNTS
        ):
            return unit
    raise Refusal(
        f"engine.exact: products of {what} in {rows.dtype} have other bits in other batches on "
        f"this {rows.device.type} with {threads} threads; set it to false"
    )


@cache
@torch.no_grad()
def attention_unit(
    dim: int, value_dim: int, dtype: torch.dtype, threads: int, device: torch.device
) -> int:
    """Return the unit of rows for products with the keys and with the values of a block.

    Args:
        dim, value_dim: of a head.
    Raises: Refusal where there is none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        queries = torch.randn(3, TRIED_ROWS, dim).to(device, dtype)
        weights = torch.rand(3, TRIED_ROWS, KEYS).to(device, dtype)
        # The second block of a sequence.
        keys = torch.randn(3, 2 * KEYS, dim).to(device, dtype)[:, KEYS:].transpose(1, 2)
        values = torch.randn(3, 2 * KEYS, value_dim).to(device, dtype)[:, KEYS:]
    found = []
    for rows, others in ((queries, keys), (weights, values)):

        def compute(own: Tensor, unit: int, others: Tensor = others) -> Tensor:
            # One sequence alone, then several.
            whole = F.pad(own, (0, 0, 0, -own.shape[1] % unit))
            one = torch.bmm(whole[:1], others[:1])
            found = torch.cat([one, torch.bmm(whole[1:], others[1:])])
            return found[:, : own.shape[1]]

        what = f"heads of {dim} and {value_dim} elements"
        found.append(least_unit(UNITS, compute, rows, what=what, threads=threads))
    return max(found)
