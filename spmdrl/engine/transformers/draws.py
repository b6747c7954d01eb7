"""From logits to tokens: penalties, truncation, and one random number for each token.

There is no generator with a state: a token's random number is a hash of its request's seed and its
position. So what a request draws does not depend on the other requests of a step. Penalties are
computed by the trainers' rule, truncation by vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.algorithms.splitmix import GAMMA, mix, uniform
from spmdrl.config import Penalties
from spmdrl.engine.protocol import Truncation
from spmdrl.model.logit_passes import log_probs
from spmdrl.model.sampling_rules import penalise
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
    return uniform(mix(mix(seeds - GAMMA) + positions * GAMMA))


def draw(
    logits: Tensor,
    *,
    temperatures: Tensor,
    at: Tensor,
    truncations: Sequence[Truncation] = (),
    is_exact: bool = False,
) -> tuple[Tensor, Tensor, SamplingMasks | None]:
    """Draw a token from each row by inverting its cumulative distribution.

    Args:
        logits: [N, V], any float dtype.
        temperatures: [N] float32; 0 takes the likeliest token.
        at: [N] float64 in [0, 1), where to look in the distribution.
        truncations: one for each row; empty where no row is truncated.
        is_exact: whether logprobs have the bits of the trainer's head. torch's own function, which
            takes half of the time, has others.
    Returns: tokens [N] int64; their natural logprobs [N] float32 under softmax(logits /
        temperature), or softmax(logits) for temperature 0, over the ids that truncation leaves;
        the masks of these ids, None without truncations.
    """
    num_rows = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    tokens = []
    logprobs = []
    masks = []
    for first in range(0, len(logits), num_rows):
        rows = slice(first, first + num_rows)
        drawn = _draw(
            logits[rows], temperatures[rows], at[rows], truncations[rows], is_exact=is_exact
        )
        tokens.append(drawn[0])
        logprobs.append(drawn[1])
        masks.append(drawn[2])
    joined = SamplingMasks.concat(masks, [len(part) for part in tokens])
    return torch.cat(tokens), torch.cat(logprobs), joined


def _draw(
    logits: Tensor,
    temperatures: Tensor,
    at: Tensor,
    truncations: Sequence[Truncation],
    *,
    is_exact: bool,
) -> tuple[Tensor, Tensor, SamplingMasks | None]:
    is_greedy = temperatures == 0
    scale = torch.where(is_greedy, 1.0, temperatures)
    logits = logits.float() / scale[:, None]
    masks = None
    if truncations:
        logits = truncate(logits, truncations)
        masks = SamplingMasks.from_allowed(logits != -torch.inf)  # a NaN is found below
    logprobs = log_probs(logits) if is_exact else logits.log_softmax(dim=-1)
    # Whole numbers, whose sums do not depend on the order of summation.
    ends = (logprobs.exp().double() * _UNIT).long().cumsum(dim=-1)
    total = ends[:, -1]
    target = torch.minimum((at * total).long(), total - 1)
    tokens = torch.searchsorted(ends, target[:, None], right=True)[:, 0]
    tokens = torch.where(is_greedy, logprobs.argmax(dim=-1), tokens)
    # A row of NaN has no total: take any token that exists. Its logprob is NaN.
    tokens = tokens.clamp(0, logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], masks


# --------------------------------------------------------------------------- truncation


def truncate(logits: Tensor, truncations: Sequence[Truncation]) -> Tensor:
    """Return logits with -inf for the ids that a row's truncation leaves out.

    Args:
        logits: [N, V] float32, divided by the temperature.
        truncations: N of them.
    Source: vLLM 0.32, v1/sample: MinPLogitsProcessor, then apply_top_k_top_p_pytorch.
    """
    vocab = logits.shape[1]
    device = logits.device

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    if any(t.min_p for t in truncations):
        probs = logits.softmax(dim=-1)
        min_p = column([t.min_p for t in truncations], torch.float32)
        least = probs.amax(dim=-1, keepdim=True) * min_p
        logits = logits.masked_fill(probs < least, -torch.inf)
    if not any(t.top_k or t.top_p < 1 for t in truncations):
        return logits
    ascending, order = logits.sort(dim=-1)
    if any(t.top_k for t in truncations):
        counts = [min(t.top_k, vocab) or vocab for t in truncations]
        last = ascending.gather(1, vocab - column(counts, torch.int64))
        ascending = ascending.masked_fill(ascending < last, -torch.inf)
    if any(t.top_p < 1 for t in truncations):
        cumulative = ascending.softmax(dim=-1).cumsum(dim=-1)
        is_out = cumulative <= 1 - column([t.top_p for t in truncations], torch.float32)
        is_out[:, -1] = False  # one id stays
        ascending = ascending.masked_fill(is_out, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ascending)


# --------------------------------------------------------------------------- penalties


def penalise_rows(
    logits: Tensor,
    penalties: Sequence[Penalties],
    *,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> Tensor:
    """Return logits [N, V] float32 with the penalties of each row; as they are where no row has
    any.

    Args:
        prompts, responses: the N sequences, whose next tokens the logits are of.
    """
    kinds = {own for own in penalties if own.is_on}
    if not kinds:
        return logits
    penalised = logits.float().clone()
    for kind in kinds:
        rows = [row for row, own in enumerate(penalties) if own == kind]
        own_logits = penalised[rows]
        own_responses = [responses[row] for row in rows]
        came = None
        counts = None
        if kind.repetition != 1:
            came = _counts(own_logits, [[*prompts[row], *responses[row]] for row in rows]) > 0
        if kind.counts_response:
            counts = _counts(own_logits, own_responses)
        penalised[rows] = penalise(own_logits, kind, came=came, counts=counts, first=0)[0]
    return penalised


def _counts(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return how often each id occurs in rows of tokens, [N, V] int32."""
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    for row, own in enumerate(tokens):
        ids = torch.tensor(own, dtype=torch.int64, device=logits.device)
        counts[row] = torch.bincount(ids, minlength=logits.shape[1])
    return counts
