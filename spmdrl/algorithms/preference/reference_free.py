"""Losses on pairs that need no reference policy; see the package for the inputs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.masked import (
    Stats,
    check_not_negative,
    check_positive,
    keep,
    log1mexp,
    masked_mean,
)
from spmdrl.algorithms.preference.shared import pair_stats, pairs_in_loss


def simpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> tuple[Tensor, Stats]:
    """Compare log pi per token, without a reference: -log sigma(beta (w - l) - gamma).

    Args:
        beta: scale of the mean logprobs, above 0. gamma: margin to reach, in units of the
            reward (the paper's code asks for gamma / beta), at least 0.
    Returns: terms [P] and stats; rewards are beta log pi / |y|.
    Raises: ValueError for an option out of range.
    Source: arXiv 2405.14734 eq. 6.
    """
    check_positive(beta=beta)
    check_not_negative(gamma=gamma)
    kept = pairs_in_loss(chosen_lengths, rejected_lengths)
    chosen = beta * keep(chosen_logps, kept) / chosen_lengths.clamp(min=1)
    rejected = beta * keep(rejected_logps, kept) / rejected_lengths.clamp(min=1)
    stats = pair_stats(
        (chosen, rejected), (chosen_logps, rejected_logps), (chosen_lengths, rejected_lengths)
    )
    return keep(-logsigmoid(chosen - rejected - gamma), kept), stats


def cpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
    nll_weight: float = 1.0,
) -> tuple[Tensor, Stats]:
    """Prefer and imitate, without a reference: -log sigma(beta (w - l)) + nll_weight NLL_w.

    Args:
        beta: scale of the summed logprobs, above 0.
        nll_weight: of the chosen response's negative log-likelihood per token, at least 0.
    Returns: terms [P] and stats, also preference/nll; rewards are beta log pi.
    Raises: ValueError for an option out of range.
    Source: arXiv 2401.08417 (CPO). Deviation: the NLL is the mean over the response's own
        tokens; TRL's is over a micro-batch's, which depends on the layout.
    """
    check_positive(beta=beta)
    check_not_negative(nll_weight=nll_weight)
    kept = pairs_in_loss(chosen_lengths, rejected_lengths)
    chosen, rejected = keep(chosen_logps, kept), keep(rejected_logps, kept)
    nll = -chosen / chosen_lengths.clamp(min=1)
    terms = -logsigmoid(beta * (chosen - rejected)) + nll_weight * nll
    stats = pair_stats(
        (beta * chosen, beta * rejected),
        (chosen_logps, rejected_logps),
        (chosen_lengths, rejected_lengths),
    )
    return keep(terms, kept), stats | {"preference/nll": masked_mean(nll, kept)}


def orpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    odds_weight: float = 0.1,
) -> tuple[Tensor, Stats]:
    """Imitate the chosen and compare odds: NLL_w - odds_weight log sigma(logit_w - logit_l).

    logit = log p / (1 - p) with p = exp(log pi / |y|), NLL_w = -log pi_w / |w|.

    Args:
        odds_weight: of the comparison, at least 0.
    Returns: terms [P] and stats, also preference/nll; rewards are the log odds.
    Raises: ValueError for an option out of range.
    Source: arXiv 2403.07691 eq. 6 and 7. Deviation: a mean logprob above -1e-6 counts as
        -1e-6 in the odds, which are infinite at p = 1.
    """
    check_not_negative(odds_weight=odds_weight)
    kept = pairs_in_loss(chosen_lengths, rejected_lengths)
    chosen = keep(chosen_logps, kept) / chosen_lengths.clamp(min=1)
    rejected = keep(rejected_logps, kept) / rejected_lengths.clamp(min=1)
    odds_chosen, odds_rejected = _log_odds(chosen), _log_odds(rejected)
    terms = -chosen - odds_weight * logsigmoid(odds_chosen - odds_rejected)
    stats = pair_stats(
        (odds_chosen, odds_rejected),
        (chosen_logps, rejected_logps),
        (chosen_lengths, rejected_lengths),
    )
    return keep(terms, kept), stats | {"preference/nll": masked_mean(-chosen, kept)}


def _log_odds(mean_logps: Tensor) -> Tensor:
    mean_logps = mean_logps.clamp(max=-1e-6)
    return mean_logps - log1mexp(mean_logps)
