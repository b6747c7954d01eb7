"""How far two ways to compute the same scores may be apart, by the rounding that is measured here.

Rows of other shapes take other kernels, which add the same numbers in another order. How much that
changes depends on the model, the dtype and the device, so it is measured: by rows of one sequence,
which can hold nothing of another, and by the first half of the same sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from spmdrl.model_inputs import TokenIds

Ids = TypeVar("Ids", bound=Sequence[int])

TIMES = 5
"""How much larger than the measured rounding a difference may be. Both are the mean over a few
tokens. Of two draws of one distribution, one is rarely twice the other; the rest is for rows that
are longer than those that were measured."""
EXACT = 1e-4
"""Nats. float32 rounds logprobs by 1e-6 and sums over a vocabulary by 1e-5; a tenth of this is seen
in float32, and a leak changes whole nats."""
MOST = 0.5
"""Nats. More is refused however large the rounding is: the ratios of a policy's probabilities would
be wrong by exp(0.5) = 1.65, where losses clip them at 1.2."""


def first_halves(rows: Sequence[Ids]) -> list[Ids]:
    """Return the first half of each sequence, at least 2 tokens; one with an image is whole."""
    found = []
    for row in rows:
        has_images = isinstance(row, TokenIds) and bool(row.items)
        length = len(row) if has_images else max(2, (len(row) + 1) // 2)
        found.append(row[:length])
    return found  # type: ignore[return-value]


def allowed_gap(noise: float, scores: Sequence[Tensor], *, dtype: torch.dtype) -> float:
    """Return how far the scores of tokens may be apart on average, without a limit from above.

    Args:
        noise: mean difference of two computations that differ by rounding alone.
        scores: logprobs in nats, or values, whose size says what one rounding of them is.
        dtype: in which they are computed.
    """
    size = float(torch.cat(list(scores)).abs().mean())
    return TIMES * noise + max(EXACT, torch.finfo(dtype).eps * size)
