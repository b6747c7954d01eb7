"""Advantages: one number per token, computed on one packed micro-batch.

A sequence is never split, so sums along a response are computed here. Numbers that depend on other
samples of the batch are inputs (`masked.attach`). Inputs have one entry for each packed token [T]
or each sequence of the micro-batch [S]:

    rewards [S] float64, task units
    kl_rewards [T] float, task units: -beta k per token
    values [T] float, task units, of the state before the token
    *_logprobs [T] float, nats
    loss_mask [T] bool; tokens between two turns may be False
    episode_advantages [S] float64, from a method of `advantages`, over the whole batch

Each method returns (advantages [T] float64, returns [T] float64 or None). Both are detached, and
exactly 0 off the loss mask for any input. `returns` are the targets of a value model.

Shape letters: S sequences, T packed tokens, P prompts, L positions in a response.
Raises: Refusal for a reward that is not finite, of a sequence with loss tokens (every method).
Invariant under: micro-batching, packing order, padding; dp size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.groups import ROUNDING
from spmdrl.algorithms.loss_tokens import discounted_sums, loss_tokens
from spmdrl.algorithms.masked import (
    attach,
    check_bound,
    check_not_negative,
    check_positive,
    check_unit,
)
from spmdrl.algorithms.token_baselines import (
    gigpo_steps,
    otb_totals,
    prime_baselines,
    prime_totals,
    rewards_to_go,
    token_rewards,
)
from spmdrl.errors import Refusal

# The methods, for the registry.
__all__ = ["distill", "gae", "gigpo", "otb", "prime", "reinforce_plus_plus"]

Result = tuple[Tensor, Tensor | None]


@attach(is_whitened=True)
def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    kl_rewards: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_lam: float = 1.0,
    length_alpha: float = 0.0,
) -> Result:
    """Estimate advantages with a value model: A_t = sum_k (gamma lam)^k delta_(t+k).

    delta_t = r_t + gamma V_(t+1) - V_t. The reward is at the last token, and V after it is 0.

    Args:
        gamma: discount per token, in [0, 1].
        lam: of the advantages, in [0, 1]; nearer 1 is less bias, more variance.
        value_lam: of the returns, in [0, 1]; with 1 they are the discounted rewards to come.
        length_alpha: if above 0, lam is 1 - 1 / (length_alpha |y|), at least 0, for a response
            of |y| loss tokens; 0 is off.
    Returns: advantages before whitening, and returns A(value_lam) + V.
    Raises: Refusal for an option out of range.
    Source: arXiv 1506.02438 eq. 16; 2503.01491 (value_lam, VC-PPO); 2504.05118 (length_alpha
        0.05, VAPO; clamped at 0, where its formula is negative).
    """
    check_unit(gamma=gamma, lam=lam, value_lam=value_lam)
    if not length_alpha >= 0:
        raise Refusal(f"length_alpha: must be at least 0 (0 is off), got {length_alpha}")
    tokens = loss_tokens(loss_mask, cu_seqlens)
    before = tokens.take(values)
    deltas = token_rewards(rewards, kl_rewards, tokens) + gamma * tokens.next(before) - before
    decay = torch.full_like(deltas, gamma * lam)
    if length_alpha:
        lengths = tokens.spread(tokens.counts).double()
        decay = gamma * (1 - 1 / (length_alpha * lengths)).clamp(min=0)
    advantages = discounted_sums(deltas, discounts=decay, last=tokens.last)
    returns = before + discounted_sums(deltas, discounts=gamma * value_lam, last=tokens.last)
    return tokens.put(advantages), tokens.put(returns)


@attach(is_whitened=True)
def reinforce_plus_plus(
    rewards: Tensor, kl_rewards: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor
) -> Result:
    """Sum the rewards to come: R plus the KL rewards from this token on, undiscounted.

    Returns: advantages before whitening, None.
    Source: arXiv 2501.03262 (REINFORCE++).
    """
    tokens = loss_tokens(loss_mask, cu_seqlens)
    return tokens.put(rewards_to_go(rewards, kl_rewards, tokens)), None


def distill(
    old_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    max_gap: float = 20.0,
) -> Result:
    """Follow a teacher on the policy's own samples: A_t = log pi_T - log pi_old.

    Its expectation is -KL(pi_old || pi_T) at each token.

    Args:
        max_gap: nats; the advantage is clamped to +- this. Without the clamp it is -inf for a token
            to which the teacher gives probability 0.
    Raises: Refusal for max_gap not above 0.
    Source: arXiv 2306.08543, 2306.13649 (on-policy distillation, sampled reverse KL).
    """
    check_bound(max_gap=max_gap)
    tokens = loss_tokens(loss_mask, cu_seqlens)
    gap = tokens.take(teacher_logprobs) - tokens.take(old_logprobs)
    return tokens.put(gap.clamp(-max_gap, max_gap)), None


@attach(totals=prime_totals, per_sequence=prime_baselines)
def prime(
    prm_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    rewards: Tensor,
    process_baselines: Tensor,
    episode_advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    beta: float = 0.05,
    gamma: float = 1.0,
) -> Result:
    """Add implicit process rewards to the outcome: A + sum_(s>=t) gamma^(s-t) (r_s - b).

    r_t = beta (log pi_phi - log pi_ref). phi is an implicit process reward model that trains
    together with the policy (section `critic`), with the outcomes as labels.

    Args:
        prm_logprobs, ref_logprobs: [T] float, nats: of phi before its update on this batch, and of
            its reference (model.reference).
        rewards: [S] float64, outcomes in [0, 1].
        process_baselines: [S] float64, b: mean r of the prompt's other samples. NaN: there are
            none, and only the outcome counts.
        episode_advantages: [S] float64, `rloo` of the outcomes, as in the paper.
        beta: task units per nat; the same in the baselines and in phi's loss.
        gamma: in [0, 1].
    Returns: advantages, and the outcome at each loss token, the label for phi.
    Raises: Refusal for gamma out of range.
    Source: arXiv 2502.01456 eq. 5 (PRIME), with leave-one-out advantages; process rewards of phi
        before its update on the batch, as in Algorithm 1.
    """
    check_unit(gamma=gamma)
    tokens = loss_tokens(loss_mask, cu_seqlens)
    process = beta * (tokens.take(prm_logprobs) - tokens.take(ref_logprobs))
    baselines = tokens.spread(process_baselines.double())
    process = torch.where(baselines.isnan(), 0.0, process - baselines)
    to_come = discounted_sums(process, discounts=gamma, last=tokens.last)
    advantages = tokens.spread(episode_advantages.double()) + to_come
    return tokens.put(advantages), tokens.put(tokens.spread(rewards.double()))


@attach(per_sequence=gigpo_steps)
def gigpo(
    step_table: Tensor,
    episode_advantages: Tensor,
    *,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    step_weight: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["none", "std"] = "std",
    std_eps: float = 1e-6,
) -> Result:
    """Add the advantage of the turn to that of the episode: A_E + step_weight A_S.

    A turn is a run of adjacent loss tokens; the environment's answer separates two turns.

    Args:
        step_table: [S, U] float64, advantage of each turn among the turns of the prompt that answer
            the same state (`token_baselines.gigpo_steps`).
        episode_advantages: [S] float64: `grpo`, or `dr_grpo` with scale `none`.
        step_weight: at least 0.
        gamma, scale, std_eps: options of `gigpo_steps`, which computes both inputs.
    Raises: Refusal for a negative step_weight.
    Source: arXiv 2505.10978 (GiGPO).
    """
    check_not_negative(step_weight=step_weight)
    tokens = loss_tokens(loss_mask, cu_seqlens)
    steps = step_table.to(tokens.index.device).double()[tokens.sequence, tokens.turn]
    return tokens.put(tokens.spread(episode_advantages.double()) + step_weight * steps), None


@attach(totals=otb_totals)
def otb(
    rewards: Tensor,
    otb_totals: Tensor,
    *,
    group_ids: Tensor,
    kl_rewards: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
) -> Result:
    """Subtract the optimal token baseline: G_t - sum(G_t W_t) / sum(W_t) over the prompt.

    The advantage is 0 if only one sample reaches the position, if the returns there are equal, or
    if all weights are 0 (all tokens up to there had probability 1, so they have no gradient).

    Args:
        otb_totals: [2, P, L] float64, `token_baselines.otb_totals` added up over the batch.
        group_ids: [S] int64 in [0, P).
    Source: arXiv 2602.07078; deviation: 0 at positions that only the longest response reaches.
    """
    tokens = loss_tokens(loss_mask, cu_seqlens)
    groups = tokens.spread(group_ids.to(loss_mask.device))
    weight, weighted = otb_totals[:, groups, tokens.position]
    returns = rewards_to_go(rewards, kl_rewards, tokens)
    gap = returns - weighted / torch.where(weight > 0, weight, 1.0)
    counted = (weight > 0) & (gap.abs() > ROUNDING * returns.abs())
    return tokens.put(torch.where(counted, gap, 0.0)), None


# --------------------------------------------------------------------------- whitening


def moment_sums(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return count, mean and squared deviations of the advantages of the loss tokens.

    Args:
        advantages: [T] float64. loss_mask: [T] bool.
    Returns: [3] float64: count, mean, sum of squared deviations from that mean.
        `combine_moments` merges those of micro-batches and dp ranks.
    """
    in_loss = torch.where(loss_mask, advantages, 0.0).double()
    count = loss_mask.double().sum()
    mean = in_loss.sum() / count.clamp(min=1)
    deviations = torch.where(loss_mask, in_loss - mean, 0.0)
    # A second pass removes the rounding error of the first.
    mean = mean + deviations.sum() / count.clamp(min=1)
    squares = torch.where(loss_mask, in_loss - mean, 0.0).square().sum()
    return torch.stack([count, mean, squares])


def combine_moments(parts: Tensor) -> Tensor:
    """Merge moments, as if all their tokens had been in one micro-batch.

    Args:
        parts: [R, 3] float64, `moment_sums` of R micro-batches or ranks, in the same order on
            every rank. A part without tokens has no effect.
    Returns: [3] float64: count, mean, sum of squared deviations.
    Source: Chan, Golub and LeVeque 1979, parallel variance.
    """
    counts, means, squares = parts.double().unbind(1)
    total = counts.sum()
    # Two passes, as in `moment_sums`: deviations from a first mean lose fewer digits.
    first_mean = (counts * means).sum() / total.clamp(min=1)
    mean = first_mean + (counts * (means - first_mean)).sum() / total.clamp(min=1)
    between = (counts * (means - mean).square()).sum()
    return torch.stack([total, mean, squares.sum() + between])


def mean_and_std(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population standard deviation of [3] moments; 0, 0 without tokens."""
    count, mean, squares = moments
    return mean, (squares / count.clamp(min=1)).sqrt()


def whiten(
    advantages: Tensor, *, loss_mask: Tensor, mean: Tensor, std: Tensor, eps: float = 1e-8
) -> Tensor:
    """Shift and scale loss tokens to mean 0 and standard deviation 1: (A - mean) / (std + eps).

    Args:
        advantages: [T] float64. loss_mask: [T] bool.
        mean, std: [] float64, of all loss tokens of the global batch (`mean_and_std`).
        eps: above 0.
    Returns: [T] float64, 0 off the loss mask. All are 0 if the values differ only by rounding.
    Raises: Refusal for eps not above 0.
    """
    check_positive(eps=eps)
    mean = torch.as_tensor(mean)
    std = torch.as_tensor(std)
    has_scale = std > ROUNDING * mean.abs()
    return torch.where(loss_mask & has_scale, (advantages - mean) / (std + eps), 0.0)
