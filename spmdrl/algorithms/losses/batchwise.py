"""Losses that select tokens by a statistic of the whole batch. T packed tokens, N loss tokens.

The statistic is a scalar. The method's `statistics` computes it from pi_old once per batch, so it
is the same for every rank, micro-batch and update. Each token is compared with it by a number of
its own: of pi_old in m2po, of the current pi in clip_cov and kl_cov.

Deviation from the papers: they compute the statistic again for each mini-batch, so their result
depends on the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    Loss,
    PolicyShift,
    sampled_logprobs,
    shift_from_old,
    shift_from_rollout,
)
from spmdrl.algorithms.masked import (
    attach,
    check_not_negative,
    check_positive,
    check_share,
    derive,
    keep,
    masked_mean,
)
from spmdrl.algorithms.splitmix import mix, uniform
from spmdrl.errors import Refusal

__all__ = ["clip_cov", "kl_cov", "m2po"]


def m2po_statistics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, threshold: float = 0.04
) -> dict[str, Tensor]:
    """Find the largest squared log-ratio at which the mean of the smaller ones is in bounds.

    Args:
        old_logprobs, rollout_logprobs: [N] float, nats, loss tokens of the whole batch.
        threshold: bound on the mean of (log pi_old - log mu)^2 over the remaining tokens, nats^2.
    Returns: m2_cut [] float64, nats^2: tokens with a larger square are dropped. Tokens with equal
        squares are treated alike. -1: even the smallest square is too large; inf: no tokens.
    Raises: Refusal for a threshold that is not above 0.
    Invariant under: permuting the columns.
    """
    check_positive(threshold=threshold)
    squares = _squared_log_rho(old_logprobs, rollout_logprobs).sort().values
    if not len(squares):
        return {"m2_cut": squares.new_tensor(float("inf"))}
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    is_last_of_equals = torch.cat([squares[1:] != squares[:-1], means.new_ones(1).bool()])
    may_stay = is_last_of_equals & (means <= threshold)
    return {"m2_cut": torch.where(may_stay, squares, -1.0).max()}


@attach(statistics=m2po_statistics)
def m2po(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    m2_cut: Tensor,
    threshold: float = 0.04,
) -> Loss:
    """Return -w A without the batch's outliers in (log pi_old - log mu)^2.

    Tokens with the largest squares are dropped until the mean over the others is at most
    `threshold`. w = pi / mu already corrects for the engine; do not add a correction.

    Args:
        logprobs, old_logprobs, rollout_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        m2_cut: [] float64, nats^2, from m2po_statistics.
        threshold: bound on the mean square of the remaining tokens, above 0; acts through m2_cut.
    Returns: terms [T] and stats.
    Raises: Refusal for a threshold that is not above 0.
    Source: arXiv 2510.01161 (M2PO). Deviations: the square is of the log-ratio at the batch's
        start, as in AReaL, where the paper has the current log w; all tokens may be dropped, where
        the reference code keeps at least one.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_positive(threshold=threshold)
    shift = shift_from_rollout(
        logprobs, rollout_logprobs, advantages=advantages, loss_mask=loss_mask
    )
    dropped = _squared_log_rho(old_logprobs, rollout_logprobs) > m2_cut
    return shift.loss(-shift.ratio * shift.advantages, dropped=dropped)


def _squared_log_rho(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    sampled = sampled_logprobs(old_logprobs, rollout_logprobs)
    return (old_logprobs.detach().double() - sampled.double()).square()


def clip_cov_statistics(
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    select_frac: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> dict[str, Tensor]:
    """Compute the means of the covariance, and the probability that a candidate is selected.

    Args:
        old_logprobs, advantages: [N] float, loss tokens of the whole batch.
        select_frac: share of all loss tokens to select. cov_low, cov_high: as in clip_cov.
    Returns: mean_advantage, mean_logprob (nats) and select_probability, [] float64.
    Raises: Refusal for options out of range.
    Invariant under: permuting the columns.
    """
    _check_select(select_frac, cov_low=cov_low, cov_high=cov_high)
    mean_advantage = _mean(advantages)
    mean_logprob = _mean(old_logprobs)
    covariance = _covariance(old_logprobs, advantages, mean_logprob, mean_advantage)
    candidates = ((covariance > cov_low) & (covariance < cov_high)).sum()
    wanted = max(select_frac * len(covariance), 1.0)
    chance = (wanted / candidates.double().clamp(min=1)).clamp(max=1)
    return {
        "mean_advantage": mean_advantage,
        "mean_logprob": mean_logprob,
        "select_probability": chance,
    }


@attach(statistics=clip_cov_statistics)
@derive(shift=shift_from_old)
def clip_cov(
    shift: PolicyShift,
    *,
    token_keys: Tensor,
    version: Tensor,
    mean_advantage: Tensor,
    mean_logprob: Tensor,
    select_probability: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    select_frac: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Loss:
    """Clip as ppo_clip, and drop a few tokens of high covariance, which lower entropy most.

    Candidates are tokens with c = (A - mean A)(log pi - mean log pi) in (cov_low, cov_high) whose
    ratio is not clipped. Each candidate is dropped with the same probability, such that
    `select_frac` of all loss tokens, and at least one, are dropped in expectation.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        token_keys: [T] int64, unique in the batch. version: [] int64, the policy version that
            trains. A hash of both is the token's random number, the same on every layout.
        mean_advantage, mean_logprob, select_probability: [] float64, from clip_cov_statistics.
        clip_low, clip_high: distances from 1 of the bounds on the ratio.
        select_frac: share of the loss tokens to drop, in (0, 1]; acts through
            select_probability. cov_low, cov_high: open bounds on c, in nats times advantage.
    Returns: terms [T] and stats.
    Raises: Refusal for options out of range.
    Source: arXiv 2505.22617 (Clip-Cov); deviation: the paper drops an exact number of tokens; here
        that is the expected number, for the candidates at the batch's start.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    _check_select(select_frac, cov_low=cov_low, cov_high=cov_high)
    covariance = _covariance(shift.logprobs, shift.advantages, mean_logprob, mean_advantage)
    surrogate, low, high = shift.clipped_surrogate(clip_low, clip_high)
    is_candidate = (covariance > cov_low) & (covariance < cov_high) & ~low & ~high
    dropped = is_candidate & (draw_uniform(token_keys, version) < select_probability)
    return shift.loss(-surrogate, low=low, high=high, dropped=dropped)


def kl_cov_statistics(
    old_logprobs: Tensor, advantages: Tensor, *, select_frac: float = 2e-3
) -> dict[str, Tensor]:
    """Compute the means of the covariance, and the value above which tokens are selected.

    Args:
        old_logprobs, advantages: [N] float, loss tokens of the whole batch.
        select_frac: share of all loss tokens to select, at least one token.
    Returns: mean_advantage, mean_logprob (nats) and cov_cut, [] float64. Tokens with a covariance
        above cov_cut are selected. Tokens equal to it are not, so at most the share is selected,
        and no token if all advantages are equal.
    Raises: Refusal for a share out of range.
    Invariant under: permuting the columns.
    """
    check_share(select_frac=select_frac)
    mean_advantage = _mean(advantages)
    mean_logprob = _mean(old_logprobs)
    covariance = _covariance(old_logprobs, advantages, mean_logprob, mean_advantage)
    count = max(1, int(select_frac * len(covariance)))
    if count < len(covariance):
        # At most `count` values are above the value at place `count + 1`.
        cut = covariance.topk(count + 1).values[-1]
    else:
        cut = covariance.new_tensor(float("-inf"))
    return {"mean_advantage": mean_advantage, "mean_logprob": mean_logprob, "cov_cut": cut}


@attach(statistics=kl_cov_statistics)
@derive(shift=shift_from_old)
def kl_cov(
    shift: PolicyShift,
    *,
    mean_advantage: Tensor,
    mean_logprob: Tensor,
    cov_cut: Tensor,
    select_frac: float = 2e-3,
    kl_coef: float = 1.0,
) -> Loss:
    """Return -r A, plus kl_coef |log r| on the few tokens of highest covariance.

    The covariance is c = (A - mean A)(log pi - mean log pi). There is no clip. At the batch's start
    the penalty applies to the top share of tokens. In later updates it applies to every token whose
    c is above the same cut.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        mean_advantage, mean_logprob, cov_cut: [] float64, from kl_cov_statistics.
        select_frac: share of the loss tokens with a penalty, in (0, 1]; acts through cov_cut.
        kl_coef: strength of the penalty, per nat, at least 0.
    Returns: terms [T] and stats; `policy/kl_cov_frac` is the share of tokens with a penalty.
    Raises: Refusal for options out of range.
    Source: arXiv 2505.22617 (KL-Cov).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_share(select_frac=select_frac)
    check_not_negative(kl_coef=kl_coef)
    covariance = _covariance(shift.logprobs, shift.advantages, mean_logprob, mean_advantage)
    selected = shift.loss_mask & (covariance > cov_cut)
    held_back = kl_coef * keep(shift.log_ratio.abs(), selected)
    terms, stats = shift.loss(-shift.ratio * shift.advantages + held_back)
    return terms, stats | {"policy/kl_cov_frac": masked_mean(selected, shift.loss_mask)}


def draw_uniform(token_keys: Tensor, version: Tensor) -> Tensor:
    """Return a number in [0, 1) for each token, from its key and the version: [T] float64."""
    # The version is mixed first, so that a key gets an unrelated number in the next version.
    return uniform(mix(mix(version.long()) + token_keys.long()))


def _mean(values: Tensor) -> Tensor:
    # The sum of floats depends on their order, so sort them.
    return values.detach().double().sort().values.sum() / max(values.numel(), 1)


def _covariance(
    logprobs: Tensor, advantages: Tensor, mean_logprob: Tensor, mean_advantage: Tensor
) -> Tensor:
    """Return each token's share of the covariance of A and log pi, float64, detached."""
    surprise = logprobs.detach().double() - mean_logprob
    return (advantages.detach().double() - mean_advantage) * surprise


def _check_select(select_frac: float, *, cov_low: float, cov_high: float) -> None:
    check_share(select_frac=select_frac)
    if not cov_low < cov_high:
        raise Refusal(f"cov_low, cov_high: must be low < high, got {cov_low}, {cov_high}")
