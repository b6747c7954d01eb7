"""Drawing tokens, each by one number that its request's seed and its own position give.

No generator has a state: what a request draws does not depend on what is drawn beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.algorithms.splitmix import GAMMA, mixed, uniform
from spmdrl.engine.protocol import Truncation
from spmdrl.engine.truncation import truncate
from spmdrl.sampling_masks import SamplingMasks

_ELEMENTS_AT_ONCE = 2**24  # of logits: bounds the temporaries of a draw, 24 bytes for each
_UNIT = 2.0**52  # a probability of 1 as a whole number


def numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) for each pair.

    Args:
        seeds: [N] int64.
        positions: [N] int64, of the token in its response.
    Returns: [N] float64, multiples of 2^-53.
    """
    return uniform(mixed(mixed(seeds - GAMMA) + positions * GAMMA))


def draw(
    logits: Tensor, *, temperatures: Tensor, at: Tensor, truncations: Sequence[Truncation] = ()
) -> tuple[Tensor, Tensor, SamplingMasks | None]:
    """Draw a token from each row by inverting its cumulative distribution.

    Args:
        logits: [N, V], any float dtype.
        temperatures: [N] float32; 0 takes the likeliest token.
        at: [N] float64 in [0, 1), where in the distribution to look.
        truncations: of the rows; none for no truncation in any.
    Returns: tokens [N] int64; their natural logprobs [N] float32 under softmax(logits /
        temperature), or softmax(logits) for temperature 0, over the ids that were kept; which
        these are, None without truncations.
    """
    rows = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    ours = [truncations[i : i + rows] for i in range(0, len(logits), rows)]
    parts = [
        _draw(*part)
        for part in zip(logits.split(rows), temperatures.split(rows), at.split(rows), ours)
    ]
    tokens, logprobs, kept = zip(*parts)
    sets = SamplingMasks.concat(kept, [len(part) for part in tokens])
    return torch.cat(tokens), torch.cat(logprobs), sets


def _draw(
    logits: Tensor, temperatures: Tensor, at: Tensor, truncations: Sequence[Truncation]
) -> tuple[Tensor, Tensor, SamplingMasks | None]:
    is_greedy = temperatures == 0
    scale = torch.where(is_greedy, 1.0, temperatures)
    logits = logits.float() / scale[:, None]
    kept = None
    if truncations:
        logits = truncate(logits, truncations)
        kept = SamplingMasks.of(logits != -torch.inf)  # what is no number is found below
    logprobs = torch.log_softmax(logits, dim=-1)
    # Whole numbers, whose sums do not depend on the order of summation.
    ends = (logprobs.exp().double() * _UNIT).long().cumsum(dim=-1)
    total = ends[:, -1]
    wanted = torch.minimum((at * total).long(), total - 1)
    tokens = torch.searchsorted(ends, wanted[:, None], right=True)[:, 0]
    tokens = torch.where(is_greedy, logprobs.argmax(dim=-1), tokens)
    # A row of NaN has no total: any token that exists, and its logprob tells.
    tokens = tokens.clamp(0, logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], kept
