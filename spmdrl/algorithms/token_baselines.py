"""Inputs of per-token advantages that depend on the whole batch.

A method names these functions by `masked.attach`. `totals` are tables with an entry per sequence,
or per prompt and position, that are added up over micro-batches and dp ranks. `per_sequence`
computes numbers per sequence from them:

    method  totals                per_sequence
    otb     otb_totals [2, P, L]  -
    prime   prime_totals [B]      prime_baselines [B]
    gigpo   -                     gigpo_steps [B, U], from the turns in the scalars

Shape letters: S sequences of a micro-batch, B of the whole batch, T packed tokens, U most turns of
a sequence, P prompts, L positions in a response.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.advantages import dr_grpo, grpo, rloo
from spmdrl.algorithms.groups import group_rewards
from spmdrl.algorithms.loss_tokens import LossTokens, discounted_sums, loss_tokens
from spmdrl.algorithms.masked import check_unit
from spmdrl.algorithms.reduce import sequence_mean
from spmdrl.errors import Refusal

NO_TURN = -2
"""State in the entries after a sequence's last turn; -1 is the state of a turn without one."""


def prime_totals(
    prm_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    beta: float = 0.05,
) -> dict[str, Tensor]:
    """Compute each sequence's mean process reward r_t = beta (log pi_phi - log pi_ref).

    Args:
        prm_logprobs, ref_logprobs: [T] float, nats. Process reward model and its reference.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        sequence_ids: [S] int64, rows in the whole batch; ignored for sequences without loss tokens.
        num_sequences: B.
        beta: scale of the reward, task units per nat.
    Returns: implicit_means [B] float64, task units, 0 for sequences of other micro-batches.
    Source: arXiv 2502.01456 (PRIME).
    """
    gap = prm_logprobs.detach().double() - ref_logprobs.detach().double()
    means = beta * sequence_mean(gap, cu_seqlens, loss_mask=loss_mask)
    present = loss_tokens(loss_mask, cu_seqlens).counts > 0
    table = means.new_zeros(num_sequences)
    return {"implicit_means": table.index_copy(0, sequence_ids[present], means[present])}


def prime_baselines(
    implicit_means: Tensor,
    rewards: Tensor,
    *,
    group_ids: Tensor,
    is_valid: Tensor,
    loss_lengths: Tensor,
) -> dict[str, Tensor]:
    """Compare each sequence with the others of its prompt, by process rewards and by outcome.

    Args:
        implicit_means: [B] float64, from `prime_totals`. rewards: [B] float64, the outcomes.
        group_ids: [B] int64. is_valid: [B] bool. loss_lengths: [B] int64, tokens.
    Returns: process_baselines [B] float64, by `leave_one_out_means` over sequences with loss
        tokens, and episode_advantages [B] float64, by `rloo`.
    Raises: Refusal for a valid reward outside [0, 1], because the process reward model trains on it
        as a label.
    Source: arXiv 2502.01456 eq. 5 (PRIME).
    """
    outside = is_valid & ~((rewards >= 0) & (rewards <= 1))
    if outside.any():
        row = int(outside.nonzero()[0])
        raise Refusal(
            f"algorithm.advantage: prime trains its process reward model on the "
            f"rewards as labels, which must be in [0, 1], got "
            f"{float(rewards[row])} (sequence {row}, group {int(group_ids[row])}); "
            "scale and clamp them by rewards.shaping"
        )
    has_tokens = is_valid & (loss_lengths > 0)
    return {
        "process_baselines": leave_one_out_means(implicit_means, group_ids, is_valid=has_tokens),
        "episode_advantages": rloo(rewards, group_ids, is_valid=is_valid),
    }


def leave_one_out_means(values: Tensor, group_ids: Tensor, *, is_valid: Tensor) -> Tensor:
    """Average the values of the group's other valid samples.

    Args:
        values: [S] float64 of the whole batch. group_ids: [S] int64.
        is_valid: [S] bool; must be False for sequences without loss tokens.
    Returns: [S] float64; NaN if the sample, or all other samples of the group, are not valid.
    Raises: Refusal for a valid value that is not finite.
    Source: arXiv 2402.14740, 2502.01456.
    """
    groups = group_rewards(values, group_ids, is_valid=is_valid)
    means = groups.means[groups.index]
    others = (groups.counts - 1)[groups.index]
    # The difference from the group's mean is small, so no digits are lost.
    means = means + (means - groups.rewards) / others.clamp(min=1)
    return torch.where(is_valid & (others >= 1), means, torch.nan)


def gigpo_steps(
    turns: Tensor,
    rewards: Tensor,
    *,
    group_ids: Tensor,
    is_valid: Tensor,
    gamma: float = 0.95,
    scale: Literal["none", "std"] = "std",
    std_eps: float = 1e-6,
) -> dict[str, Tensor]:
    """Compare each turn with the other turns of its prompt that answer the same state.

    Args:
        turns: [B, U, 2] float64, of `types.Scalars`: reward and state of each turn.
        rewards: [B] float64, task units. The difference from the sum of the turns' rewards is added
            to the last turn.
        group_ids: [B] int64. is_valid: [B] bool.
        gamma: discount per turn, in [0, 1]. scale, std_eps: of `step_advantages`.
    Returns: step_table [B, U] float64, `step_advantages` of the returns R_k = r_k + gamma
        R_(k+1); and episode_advantages [B] float64, `grpo`, or `dr_grpo` with scale `none`.
    Raises: Refusal for gamma out of range, or if no turn of the batch has a state.
    Source: arXiv 2505.10978 (GiGPO).
    """
    check_unit(gamma=gamma)
    returns = turns[..., 0].clone()
    states = turns[..., 1]
    exists = (states > NO_TURN) & is_valid[:, None]
    if exists.any() and not (states[exists] >= 0).any():
        raise Refusal(
            "algorithm.advantage: gigpo compares turns that answer the same state, "
            "and no turn has one; give rollout.environment a method `state`, or "
            "take another advantage"
        )
    rows = torch.arange(len(returns), device=returns.device)
    last = (exists.sum(dim=1) - 1).clamp(min=0)
    returns[rows, last] += torch.where(exists.any(dim=1), rewards - returns.sum(dim=1), 0.0)
    for k in range(returns.shape[1] - 2, -1, -1):
        returns[:, k] += gamma * returns[:, k + 1]
    groups = group_ids[:, None].expand_as(states)
    table = torch.zeros_like(returns)
    table[exists] = step_advantages(
        returns[exists],
        group_ids=groups[exists],
        scale=scale,
        anchor_ids=states[exists].long(),
        std_eps=std_eps,
    )
    episodes = (
        dr_grpo(rewards, group_ids, is_valid=is_valid)
        if scale == "none"
        else grpo(rewards, group_ids, is_valid=is_valid, std_eps=std_eps)
    )
    return {"step_table": table, "episode_advantages": episodes}


def step_advantages(
    returns: Tensor,
    *,
    group_ids: Tensor,
    anchor_ids: Tensor,
    scale: Literal["none", "std"] = "std",
    std_eps: float = 1e-6,
) -> Tensor:
    """Standardise the returns of the turns of a prompt that answer the same state.

    Args:
        returns: [N] float64, discounted rewards from each turn on, of the whole batch.
        group_ids: [N] int64, prompt of each turn.
        anchor_ids: [N] int64, state that the turn answers; -1 for none.
        scale: `std` divides by the population standard deviation + std_eps; `none` only centres.
    Returns: [N] float64; exactly 0 for a turn without a state, for a state that occurs once, and
        for equal returns.
    Raises: Refusal for a return that is not finite.
    Source: arXiv 2505.10978 (GiGPO), the step advantage; deviation: the population standard
        deviation, not that of a sample.
    Invariant under: permuting turns; adding a constant per state.
    """
    pairs = torch.stack([group_ids, anchor_ids], dim=1)
    _, states = torch.unique(pairs, dim=0, return_inverse=True)
    groups = group_rewards(returns, states, is_valid=anchor_ids >= 0)
    centred = groups.centred()
    return centred / (groups.stds + std_eps)[groups.index] if scale == "std" else centred


def otb_totals(
    rewards: Tensor,
    old_logprobs: Tensor,
    *,
    square_probs: Tensor,
    kl_rewards: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor,
    num_groups: int,
    num_positions: int,
) -> dict[str, Tensor]:
    """Sum weights and weighted returns of a prompt's samples at each response position.

    W_t = sum over the tokens up to t of 1 - 2 pi + sum_v pi_v^2, which is the squared norm of the
    gradient of log pi by the logits. G_t are the rewards from t on.

    Args:
        rewards: [S] float64, task units. old_logprobs: [T] float, nats.
        square_probs: [T] float, sum over the vocabulary of pi^2.
        kl_rewards: [T] float, task units. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        group_ids: [S] int64 in [0, num_groups). num_groups: P of the whole batch.
        num_positions: L, most loss tokens of any response.
    Returns: otb_totals [2, P, L] float64: sum of W and sum of G W over the samples that reach
        the position.
    Source: arXiv 2602.07078 (optimal token baseline).
    Invariant under: micro-batching, packing order.
    """
    tokens = loss_tokens(loss_mask, cu_seqlens)
    probs = tokens.take(old_logprobs).exp()
    energy = (1 - 2 * probs + tokens.take(square_probs)).clamp(min=0)
    weights = _sums_so_far(energy, tokens)
    returns = rewards_to_go(rewards, kl_rewards, tokens)
    table = torch.zeros(2, num_groups * num_positions, dtype=torch.float64, device=returns.device)
    cells = tokens.spread(group_ids.to(returns.device)) * num_positions + tokens.position
    table = table.index_add(1, cells, torch.stack([weights, returns * weights]))
    return {"otb_totals": table.view(2, num_groups, num_positions)}


def rewards_to_go(rewards: Tensor, kl_rewards: Tensor, tokens: LossTokens) -> Tensor:
    """Return the sum of the KL rewards from each loss token on, plus the sequence's reward.

    Args:
        rewards: [S] float64, task units. kl_rewards: [T] float, task units.
    Returns: [N] float64.
    Raises: Refusal for a reward of a sequence with loss tokens that is not finite.
    """
    return discounted_sums(
        token_rewards(rewards, kl_rewards, tokens), discounts=1.0, last=tokens.last
    )


def token_rewards(rewards: Tensor, kl_rewards: Tensor, tokens: LossTokens) -> Tensor:
    """Return the KL reward of each loss token, plus the reward at the last one: [N] float64.

    Raises: Refusal for a reward of a sequence with loss tokens that is not finite.
    """
    rewards = torch.where(tokens.counts > 0, rewards.detach().double(), 0.0)
    finite = rewards.isfinite()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise Refusal(
            f"reward of sequence {row} of the micro-batch is {float(rewards[row])}; "
            "rewards must be finite"
        )
    return tokens.take(kl_rewards) + tokens.at_last(rewards)


def _sums_so_far(values: Tensor, tokens: LossTokens) -> Tensor:
    """Return the sum of [N] values from the sequence's first loss token to each: [N]."""
    # `discounted_sums` adds up later entries, so reverse the order.
    firsts = torch.arange(len(values), device=values.device) - tokens.position
    last = (len(values) - 1 - firsts).flip(0)
    return discounted_sums(values.flip(0), discounts=1.0, last=last).flip(0)
