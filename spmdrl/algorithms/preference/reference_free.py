"""Losses on pairs that need no reference policy; see the package for the inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.masked import (
    check_not_negative,
    check_positive,
    derive,
    log1mexp,
    masked_mean,
)
from spmdrl.algorithms.preference.shared import (
    Loss,
    Pairs,
    extend_linearly,
    pairs_without_reference,
)

__all__ = ["alphapo", "cpo", "orpo", "simpo"]


@derive(pairs=pairs_without_reference)
def simpo(pairs: Pairs, *, beta: float = 2.0, gamma: float = 1.0) -> Loss:
    """Compare log pi per token, without a reference: -log sigma(beta (w - l) - gamma).

    Args:
        beta: scale of the mean logprobs, above 0.
        gamma: margin to reach, in units of the reward, at least 0. (In the paper's code, the
            option is gamma / beta.)
    Returns: terms [P] and stats; rewards are beta log pi / |y|.
    Raises: Refusal for an option out of range.
    Source: arXiv 2405.14734 eq. 6.
    """
    check_positive(beta=beta)
    check_not_negative(gamma=gamma)
    chosen, rejected = rewards = pairs.per_token([beta * side for side in pairs.log_ratios])
    return pairs.loss(-logsigmoid(chosen - rejected - gamma), rewards)


@derive(pairs=pairs_without_reference)
def alphapo(pairs: Pairs, *, beta: float = 2.0, gamma: float = 1.0, alpha: float = 0.25) -> Loss:
    """Bend simpo's reward: -log sigma(r_w - r_l - gamma), r = beta (1 - p^-alpha) / alpha.

    p = exp(log pi / |y|), the geometric mean of the response's probabilities.

    Args:
        beta: scale of the rewards, above 0. gamma: margin to reach, in units of the reward, at
            least 0.
        alpha: shape of the reward. 0 is simpo; above 0 unlikely responses weigh more, below 0 less.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2501.03884 (AlphaPO). In TRL's cpo with alpha, gamma is this gamma / beta.
        Deviation: above e^20, an exponential is continued by its tangent.
    """
    check_positive(beta=beta)
    check_not_negative(gamma=gamma)
    means = pairs.per_token(pairs.log_ratios)
    bent = [-extend_linearly(torch.expm1, -alpha * m) / alpha if alpha else m for m in means]
    chosen, rejected = rewards = [beta * r for r in bent]
    return pairs.loss(-logsigmoid(chosen - rejected - gamma), rewards)


@derive(pairs=pairs_without_reference)
def cpo(pairs: Pairs, *, beta: float = 0.1, nll_weight: float = 1.0) -> Loss:
    """Compare log pi and imitate the chosen: -log sigma(beta (w - l)) + nll_weight NLL_w.

    Args:
        beta: scale of the summed logprobs, above 0.
        nll_weight: of the chosen response's negative log-likelihood per token, at least 0.
    Returns: terms [P] and stats, also preference/nll; rewards are beta log pi.
    Raises: Refusal for an option out of range.
    Source: arXiv 2401.08417 (CPO). Deviation: the NLL is the mean over the tokens of the response;
        TRL's is over those of a micro-batch, which depends on the layout.
    """
    check_positive(beta=beta)
    check_not_negative(nll_weight=nll_weight)
    chosen, rejected = pairs.log_ratios
    nll = -pairs.per_token(pairs.log_ratios)[0]
    terms = -logsigmoid(beta * (chosen - rejected)) + nll_weight * nll
    terms, stats = pairs.loss(terms, (beta * chosen, beta * rejected))
    return terms, stats | {"preference/nll": masked_mean(nll, pairs.in_loss)}


@derive(pairs=pairs_without_reference)
def orpo(pairs: Pairs, *, odds_weight: float = 0.1) -> Loss:
    """Imitate the chosen and compare odds: NLL_w - odds_weight log sigma(logit_w - logit_l).

    logit = log p / (1 - p) with p = exp(log pi / |y|), NLL_w = -log pi_w / |w|.

    Args:
        odds_weight: weight of the comparison, at least 0.
    Returns: terms [P] and stats, also preference/nll; rewards are the log odds.
    Raises: Refusal for an option out of range.
    Source: arXiv 2403.07691 eq. 6 and 7. Deviation: in the odds, which are infinite at p = 1, a
        mean logprob above -1e-6 counts as -1e-6.
    """
    check_not_negative(odds_weight=odds_weight)
    means = pairs.per_token(pairs.log_ratios)
    odds = [_log_odds(mean) for mean in means]
    terms, stats = pairs.loss(-means[0] - odds_weight * logsigmoid(odds[0] - odds[1]), odds)
    return terms, stats | {"preference/nll": masked_mean(-means[0], pairs.in_loss)}


def _log_odds(mean_logps: Tensor) -> Tensor:
    mean_logps = mean_logps.clamp(max=-1e-6)
    return mean_logps - log1mexp(mean_logps)
