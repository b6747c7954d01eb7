"""How far the trainer's policy is from the one that sampled: sums over loss tokens.

rho = pi_old / mu on tokens sampled from mu. Tokens off the loss mask enter nothing, and a
sequence without loss tokens enters no mean over sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.corrections import log_rho
from spmdrl.algorithms.reduce import sequence_mean, sequence_sum

Stats = dict[str, tuple[Tensor, Tensor]]


def mismatch_stats(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor
) -> Stats:
    """Measure engine against trainer on one micro-batch.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
    Returns: {name: (numerator, denominator)}, float64 scalars that add up over micro-batches
        and dp ranks:
        policy/mismatch_k1: -log rho per token, nats: unbiased for KL(mu || pi_old).
        policy/mismatch_k3: rho - 1 - log rho per token, nats: the same, never negative.
        policy/mismatch_prob_diff: |pi_old - mu| per token.
        policy/mismatch_logprob_diff: |log rho| per token, nats.
        policy/mismatch_ratio: rho per token; 1 in expectation.
        policy/mismatch_ess: 1 / mean(rho^2), the effective share of samples (rho has mean 1).
        policy/mismatch_seq_k1: mean -log rho within a sequence, averaged over sequences.
        policy/mismatch_nan_frac: share of tokens whose engine logprob was not finite; they
            count as rho = 1.
    """
    log_ratio = log_rho(old_logprobs, rollout_logprobs, loss_mask=loss_mask)
    rho = log_ratio.clamp(-20.0, 20.0).exp()
    finite = loss_mask & rollout_logprobs.isfinite()
    old, rollout = old_logprobs.detach().double(), rollout_logprobs.detach().double()
    gap = torch.where(finite, old.exp() - rollout.exp(), 0.0).abs()
    count = loss_mask.double().sum()
    has_tokens = sequence_sum(loss_mask, cu_seqlens) > 0
    by_sequence = -sequence_mean(log_ratio, cu_seqlens, loss_mask=loss_mask)

    def total(values: Tensor) -> Tensor:
        return torch.where(loss_mask, values, 0.0).double().sum()

    return {
        "policy/mismatch_k1": (total(-log_ratio), count),
        "policy/mismatch_k3": (total(rho - 1 - log_ratio), count),
        "policy/mismatch_prob_diff": (total(gap), count),
        "policy/mismatch_logprob_diff": (total(log_ratio.abs()), count),
        "policy/mismatch_ratio": (total(rho), count),
        "policy/mismatch_ess": (count, total(rho**2)),
        "policy/mismatch_seq_k1": (by_sequence.sum(), has_tokens.double().sum()),
        "policy/mismatch_nan_frac": (total((~rollout_logprobs.isfinite()).double()), count),
    }
