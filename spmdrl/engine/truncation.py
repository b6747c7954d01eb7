"""Which tokens stay for a draw, by vLLM's rule, and what was kept of each token drawn.

Source: vLLM 0.32, v1/sample: MinPLogitsProcessor, then apply_top_k_top_p_pytorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.engine.protocol import Truncation
from spmdrl.imports import refusing
from spmdrl.sampling_masks import SamplingMasks


def truncate(logits: Tensor, truncations: Sequence[Truncation]) -> Tensor:
    """Return logits in which those that a row's truncation leaves out are -inf.

    Args:
        logits: [N, V] float32, over temperature.
        truncations: N of them.
    """
    vocab = logits.shape[1]
    device = logits.device

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    if any(t.min_p for t in truncations):
        probs = logits.softmax(dim=-1)
        least = probs.amax(dim=-1, keepdim=True) * column(
            [t.min_p for t in truncations], torch.float32
        )
        logits = logits.masked_fill(probs < least, -torch.inf)
    if not any(t.top_k or t.top_p < 1 for t in truncations):
        return logits
    ascending, order = logits.sort(dim=-1)
    if any(t.top_k for t in truncations):
        counts = [min(t.top_k, vocab) or vocab for t in truncations]
        last = ascending.gather(1, vocab - column(counts, torch.int64))
        ascending = ascending.masked_fill(ascending < last, -torch.inf)
    if any(t.top_p < 1 for t in truncations):
        below = ascending.softmax(dim=-1).cumsum(dim=-1)
        is_out = below <= 1 - column([t.top_p for t in truncations], torch.float32)
        is_out[:, -1] = False  # one stays
        ascending = ascending.masked_fill(is_out, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ascending)


SampledRows = list[tuple[SamplingMasks, int]]
"""The sampling masks of a request's tokens so far: places in the sets of whole engine steps."""


def kept_of(rows: SampledRows, tokens: Tensor, *, key: str) -> SamplingMasks | None:
    """Return the sets of a request's tokens [n] int64; None for no token.

    Raises: RuntimeError when they are not those of its tokens.
    """
    own = [step[torch.tensor([place])] for step, place in rows]
    return checked(SamplingMasks.concat(own, [1] * len(own)), tokens, key=key)


def checked(sets: SamplingMasks | None, tokens: Tensor, *, key: str) -> SamplingMasks | None:
    """Return the sets of a request's tokens [n] int64, each of which has its own token.

    Raises: RuntimeError naming the request.
    """
    hint = "; leave sampling.top_p, top_k and min_p out"
    with refusing(f"request {key}", ValueError, kind=RuntimeError, hint=hint):
        if sets is not None:
            sets.check(tokens)
        elif len(tokens):
            raise ValueError(f"no sampling mask of its {len(tokens)} tokens")
    return sets
