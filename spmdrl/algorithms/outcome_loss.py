"""The loss of an implicit process reward model: a language model whose log-ratio is a reward.

S sequences, T packed tokens. The conventions are those of `losses`, but there is one term per
sequence. The term and gradient of a sequence without loss tokens are exactly 0.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from spmdrl.algorithms.masked import Stats, keep, masked_mean
from spmdrl.algorithms.reduce import sequence_sum

__all__ = ["outcome_loss"]


def outcome_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    outcomes: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    beta: float = 0.05,
) -> tuple[Tensor, Stats]:
    """Predict the outcome by sigma(beta sum_t (log pi_phi - log pi_ref)), with cross-entropy.

    Args:
        logprobs: [T] float, nats. phi's, with gradient. ref_logprobs: [T] float, nats.
        outcomes: [S] float, in [0, 1]: 1 is right, 0 is wrong, and a value between is partly right.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        beta: task units per nat; the same as in the rewards.
    Returns: terms [S] float64, nats, and stats per sequence with loss tokens. prm/accuracy is the
        share whose outcome and prediction are on the same side of 1/2; prm/score is the argument
        of sigma.
    Source: arXiv 2502.01456 eq. 4 (PRIME), 2412.01981.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    scores = beta * sequence_sum(keep(logprobs - ref_logprobs.detach(), loss_mask), cu_seqlens)
    present = sequence_sum(loss_mask, cu_seqlens) > 0
    labels = keep(outcomes.detach().double(), present)
    terms = keep(F.binary_cross_entropy_with_logits(scores, labels, reduction="none"), present)
    is_right = (scores.detach() > 0) == (labels > 0.5)
    return terms, {
        "prm/accuracy": masked_mean(is_right.double(), present),
        "prm/score": masked_mean(scores, present),
    }
