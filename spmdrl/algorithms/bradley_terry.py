"""Losses for a reward model: one term per pair of scored responses.

As in `preference`, a pair with a length of 0 is not in the loss: term and gradient exactly 0.
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
        margins: [P] float, score units: m, how far apart the two should be; 0 where the data
            does not say.
        center_coef: pulls scores towards mean 0, which the comparison leaves open; at least 0.
    Returns: terms [P], in the dtype of `chosen_scores`, and stats, per pair in the loss:
        reward_model/accuracy (1/2 for equal scores), reward_model/margin,
        reward_model/chosen_score, reward_model/rejected_score.
    Raises: Refusal for a negative center_coef.
    Source: Bradley and Terry 1952; arXiv 2307.09288 eq. 2 (margin); 2312.09244 (centring).
    Invariant under: permuting pairs, micro-batching, dp size, padding.
    """
    check_not_negative(center_coef=center_coef)
    kept = pairs_in_loss(chosen_lengths, rejected_lengths)
    # Replaced before the arithmetic: NaN in a row left out must not reach a gradient.
    chosen, rejected = (keep(s, kept) for s in (chosen_scores, rejected_scores))
    gap = chosen - rejected
    margins = keep(margins.detach(), kept).to(gap.dtype)
    terms = -logsigmoid(gap - margins) + center_coef * (chosen + rejected) ** 2

    return keep(terms, kept), {
        "reward_model/accuracy": masked_mean((gap.sign() + 1) / 2, kept),
        "reward_model/margin": masked_mean(gap, kept),
        "reward_model/chosen_score": masked_mean(chosen, kept),
        "reward_model/rejected_score": masked_mean(rejected, kept),
    }
