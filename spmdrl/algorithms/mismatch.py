"""How far the trainer's policy is from the engine's, which sampled: sums over loss tokens.

rho = pi_old / mu on tokens sampled from mu. Tokens off the loss mask do not count. A sequence
without loss tokens does not count in means over sequences.

Quantiles and the maximum of |pi_old - mu| cannot be added up over micro-batches and ranks, but
counts in fixed bins can. `gap_histogram` counts, `gap_quantile` and `gap_max` read the sum of the
counts, and `gap_sums` computes the metrics. `correction_advice` tells users when the gap is too
large.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.algorithms.corrections import log_rho
from spmdrl.algorithms.masked import Stats, keep, masked_mean
from spmdrl.algorithms.reduce import sequence_mean, sequence_sum
from spmdrl.errors import Refusal

_BINS_PER_DECADE = 50  # a bin's upper edge is 4.7 % above its lower edge
_DECADES = 8  # gaps from 1e-8 to 1
MIN_ESS = 0.5
MAX_OUTSIDE_FRAC = 0.05
"""Bounds of `correction_advice`, shares of the loss tokens."""
NUM_GAP_BINS = 1 + _BINS_PER_DECADE * _DECADES  # the first bin holds gaps below 1e-8


def mismatch_stats(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor
) -> Stats:
    """Compare engine and trainer on one micro-batch.

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
        policy/mismatch_outside_frac: share of tokens with rho outside [0.5, 2].
        policy/mismatch_nan_frac: share of tokens whose engine logprob was not finite. The other
            metrics count them with rho = 1.
    """
    log_ratio = log_rho(old_logprobs, rollout_logprobs, loss_mask=loss_mask)
    rho = log_ratio.clamp(-20.0, 20.0).exp()
    gap = _gap(old_logprobs, rollout_logprobs, loss_mask=loss_mask)
    has_tokens = sequence_sum(loss_mask, cu_seqlens) > 0
    by_sequence = -sequence_mean(log_ratio, cu_seqlens, loss_mask=loss_mask)
    tokens = {
        "k1": -log_ratio,
        "k3": rho - 1 - log_ratio,
        "prob_diff": gap,
        "logprob_diff": log_ratio.abs(),
        "ratio": rho,
        "outside_frac": (rho < 0.5) | (rho > 2),
        "nan_frac": ~rollout_logprobs.isfinite(),
    }
    stats = {f"policy/mismatch_{k}": masked_mean(v, loss_mask) for k, v in tokens.items()}
    squares, count = masked_mean(rho**2, loss_mask)
    stats["policy/mismatch_ess"] = (count, squares)
    stats["policy/mismatch_seq_k1"] = (by_sequence.sum(), has_tokens.double().sum())
    return stats


def carried_stats(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    policy_versions: Tensor,
    version: Tensor,
    loss_mask: Tensor,
) -> Stats:
    """Say how many tokens were drawn after weights changed within their turn, and what that costs.

    A token is carried if older weights drew the first token of its turn. With kv_cache `keep`, it
    was drawn from keys and values of those weights, which the trainer does not have. The gap is
    measured on tokens that the trainer's own weights drew: it is this difference and rounding.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        policy_versions: [T] int64, -1 where nothing was sampled, as before each turn.
        version: [] int64, of the trainer's weights.
        loss_mask: [T] bool.
    Returns: sums as `mismatch_stats`:
        policy/carried_frac: share of carried tokens.
        policy/carried_age: by how many versions they are newer than the first of their turn.
        policy/carried_gap: |log rho| per such token, nats.
    """
    gap = log_rho(old_logprobs, rollout_logprobs, loss_mask=loss_mask).abs()
    is_sampled = policy_versions >= 0
    is_first = is_sampled & ~is_sampled.roll(1)
    places = torch.arange(len(policy_versions), device=policy_versions.device)
    first = torch.where(is_first, places, 0).cummax(0).values
    age = policy_versions - policy_versions[first]
    is_carried = loss_mask & (age > 0)
    is_own = is_carried & (policy_versions == version)
    return {
        "policy/carried_frac": masked_mean(is_carried, loss_mask),
        "policy/carried_age": masked_mean(age, is_carried),
        "policy/carried_gap": masked_mean(gap, is_own),
    }


def gap_histogram(old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Count the loss tokens of one micro-batch by their gap |pi_old - mu|.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats. loss_mask: [T] bool.
    Returns: [NUM_GAP_BINS] float64, tokens; add up over micro-batches and dp ranks. Bin 0 counts
        gaps below 1e-8, and bin i gaps from 10^((i-1)/50 - 8) to 10^(i/50 - 8). The last bin also
        counts all larger gaps, and tokens whose trainer logprob is NaN. Tokens whose engine
        logprob is not finite have gap 0.
    """
    gap = _gap(old_logprobs, rollout_logprobs, loss_mask=loss_mask)
    # Clamp as floats: converting an infinity to an integer is undefined.
    position = ((gap.log10() + _DECADES) * _BINS_PER_DECADE).floor() + 1
    position = position.nan_to_num(nan=NUM_GAP_BINS).clamp(0, NUM_GAP_BINS - 1).long()
    bins = torch.zeros(NUM_GAP_BINS, dtype=torch.float64, device=gap.device)
    return bins.index_add(0, position, loss_mask.double())


def gap_quantile(histogram: Tensor, frac: float) -> Tensor:
    """Read a quantile of the gap from a sum of `gap_histogram`.

    Args:
        histogram: [NUM_GAP_BINS] float64, tokens.
        frac: share of the tokens at or below the quantile, in (0, 1].
    Returns: [] float64, within 2.4 % of the quantile; 0 if that is below 1e-8 or there are no
        tokens.
    Raises: Refusal for a frac out of range.
    """
    if not 0 < frac <= 1:
        raise Refusal(f"frac: must be in (0, 1], got {frac}")
    return _bin_value(_bin_at(histogram, frac), within=0.5)


def gap_max(histogram: Tensor) -> Tensor:
    """Read an upper bound of the largest gap from a sum of `gap_histogram`.

    Args:
        histogram: [NUM_GAP_BINS] float64, tokens.
    Returns: [] float64: at least the largest gap and at most 4.8 % above it; 0 if no gap reaches
        1e-8 or there are no tokens.
    """
    return _bin_value(_bin_at(histogram, 1.0), within=1.0)


def gap_sums(histogram: Tensor) -> dict[str, tuple[float, float]]:
    """Return the metrics of the gap for one update, from the sum over all trainer ranks.

    Args:
        histogram: [NUM_GAP_BINS] float64, tokens, `gap_histogram` added up.
    Returns: {metric: (value, 1)}, so that several updates of a step are averaged; {} without
        tokens.
    """
    if not histogram.sum() > 0:
        return {}
    return {
        "policy/mismatch_prob_diff_p999": (float(gap_quantile(histogram, 0.999)), 1.0),
        "policy/mismatch_prob_diff_max": (float(gap_max(histogram)), 1.0),
    }


def correction_advice(metrics: Mapping[str, float], correction: str, lag: int) -> str:
    """Return advice for a user when the engine's policy is too far from the trainer's.

    It is too far if the effective share of the samples is below one half, or more than one ratio in
    twenty is outside [0.5, 2]. Then few tokens determine the update, with any correction.

    Args:
        metrics: of one step, by name. A missing metric counts as good.
        correction: algorithm.correction. lag: steps.
    Returns: a sentence or two; empty if nothing is wrong.
    """
    ess = metrics.get("policy/mismatch_ess", 1.0)
    outside = metrics.get("policy/mismatch_outside_frac", 0.0)
    if ess >= MIN_ESS and outside <= MAX_OUTSIDE_FRAC:
        return ""
    if lag:
        source = f"lower lag below {lag}, optimizer.lr or batch.updates_per_step"
    else:  # both hold the same weights
        source = (
            "find where engine and trainer compute differently: set engine.dtype and "
            "model.compute_dtype to the same dtype and look at sync/probe_gap"
        )
    masks = "set algorithm.correction to icepop or mis, which leave such tokens out"
    remedies = {
        "none": f"{masks} (unless the loss weighs by pi / mu itself), and {source}",
        "tis": f"{masks}, and {source}",
    }
    return (
        f"policy/mismatch_ess {ess:.2f} (healthy from {MIN_ESS}), "
        f"policy/mismatch_outside_frac {outside:.3f} (healthy to {MAX_OUTSIDE_FRAC}): the "
        f"correction {correction!r} is not enough for lag {lag}. To fix this, "
        f"{remedies.get(correction, source)}."
    )


def _bin_at(histogram: Tensor, frac: float) -> Tensor:
    reached = histogram.cumsum(0) >= frac * histogram.sum()
    return reached.double().argmax()  # the first bin that reaches the share


def _bin_value(position: Tensor, *, within: float) -> Tensor:
    exponent = (position.double() - 1 + within) / _BINS_PER_DECADE - _DECADES
    return torch.where(position == 0, 0.0, 10.0**exponent)


def _gap(old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    old = old_logprobs.detach().double()
    rollout = rollout_logprobs.detach().double()
    return keep(old.exp() - rollout.exp(), loss_mask & rollout.isfinite()).abs()
