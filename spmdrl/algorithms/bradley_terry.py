"""Losses for a reward model: one term per pair of scored responses.

As in `preference`, a pair with a length of 0 is not in the loss: its term and gradient are exactly
0.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.masked import Stats, check_not_negative, keep, masked_mean
from spmdrl.algorithms.preference.shared import pairs_in_loss

__all__ = ["bradley_terry"]


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    margins: Tensor,
    center_coef: float = 0.0,
) -> tuple[Tensor, Stats]:
    """Score the chosen above the rejected: -log sigma(s_w - s_l - m) + center_coef (s_w + s_l)^2.

    Args:
        chosen_scores, rejected_scores: [P] float, score units. P pairs.
        chosen_lengths, rejected_lengths: [P] int64, tokens.
        margins: [P] float, score units: m, the difference that the two scores should have; 0 if
            the data does not specify one.
        center_coef: pulls scores towards mean 0, which comparisons alone do not determine; at
            least 0.
    Returns: terms [P], in the dtype of `chosen_scores`, and stats, per pair in the loss:
        reward_model/accuracy (1/2 for equal scores), reward_model/margin,
        reward_model/chosen_score, reward_model/rejected_score.
    Raises: Refusal for a negative center_coef.
    Source: Bradley and Terry 1952; arXiv 2307.09288 eq. 2 (margin); 2312.09244 (centring).
    Invariant under: permuting pairs, micro-batching, dp size, padding.
    """
    check_not_negative(center_coef=center_coef)
    in_loss = pairs_in_loss(chosen_lengths, rejected_lengths)
    # Mask before the arithmetic: NaN in a pair outside the loss must not reach a gradient.
    chosen = keep(chosen_scores, in_loss)
    rejected = keep(rejected_scores, in_loss)
    gap = chosen - rejected
    margins = keep(margins.detach(), in_loss).to(gap.dtype)
    terms = -logsigmoid(gap - margins) + center_coef * (chosen + rejected) ** 2

    return keep(terms, in_loss), {
        "reward_model/accuracy": masked_mean((gap.sign() + 1) / 2, in_loss),
        "reward_model/margin": masked_mean(gap, in_loss),
        "reward_model/chosen_score": masked_mean(chosen, in_loss),
        "reward_model/rejected_score": masked_mean(rejected, in_loss),
    }
