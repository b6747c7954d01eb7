"""Penalties of the transformers engine: the rule is the trainers' own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.config import Penalties
from spmdrl.engine.transformers_runner import Sampled
from spmdrl.model.sampling_rules import penalise


def penalised(logits: Tensor, sequences: Sequence[Sampled]) -> Tensor:
    """Return logits [N, V] with the penalties of the N sequences that they are of, float32; as they
    are where there are none."""
    kinds = {s.request.penalties for s in sequences if s.request.penalties.is_on}
    found = logits.float().clone() if kinds else logits
    for kind in kinds:
        rows = [at for at, s in enumerate(sequences) if s.request.penalties == kind]
        found[rows] = _by_one(found[rows], kind, [sequences[at] for at in rows])
    return found


def _by_one(logits: Tensor, penalties: Penalties, sequences: Sequence[Sampled]) -> Tensor:
    came = counts = None
    if penalties.repetition != 1:
        came = _counts(logits, [s.all_tokens for s in sequences]) > 0
    if penalties.counts_response:
        counts = _counts(logits, [s.tokens for s in sequences])
    return penalise(logits, penalties, came=came, counts=counts, first=0)[0]


def _counts(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return how often each id stands in rows of tokens, [N, V] int32."""
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    lengths = torch.tensor([len(row) for row in tokens])
    rows = torch.arange(len(tokens)).repeat_interleave(lengths).to(logits.device)
    ids = torch.tensor([i for row in tokens for i in row], dtype=torch.int64, device=logits.device)
    one = torch.ones(len(ids), dtype=torch.int32, device=logits.device)
    return counts.index_put_((rows, ids), one, accumulate=True)
