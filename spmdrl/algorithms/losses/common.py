"""Helpers of the policy losses: log-ratios, clipping, stats, checks. T packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spmdrl.algorithms.masked import Stats, keep, masked_mean
from spmdrl.errors import Refusal

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it one token decides the whole gradient
Loss = tuple[Tensor, Stats]
"""[T] terms, and stats."""


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return log r = log pi - log pi_old: [T], nats, 0 off the loss mask."""
    return keep(logprobs - old_logprobs.detach(), loss_mask)


def ratio_of(log_r: Tensor) -> Tensor:
    """Return r from log r in nats. Losses clamp log-ratios only here."""
    return log_r.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sampled_logprobs(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return log mu: [T], nats, detached.

    Where the engine's logprob is not finite, mu is set to the current policy. Then the ratio is 1,
    with the gradient of an on-policy token.
    """
    rollout = rollout_logprobs.detach()
    return torch.where(rollout.isfinite(), rollout, logprobs.detach())


@dataclass(frozen=True)
class PolicyShift:
    """The change of the policy since an earlier one at T tokens, and the losses based on it."""

    logprobs: Tensor
    """[T] log pi, with its gradient."""
    earlier_logprobs: Tensor
    """[T] logprobs of the earlier policy, detached."""
    log_ratio: Tensor
    """[T] difference of the two, 0 off the loss mask."""
    advantages: Tensor
    """[T], detached, 0 off the loss mask."""
    loss_mask: Tensor
    is_from_old: bool
    """Whether the earlier policy is pi_old; otherwise it is mu."""

    @cached_property
    def ratio(self) -> Tensor:
        """[T] ratio of the probabilities, current by earlier."""
        return ratio_of(self.log_ratio)

    @property
    def zero_with_grad(self) -> Tensor:
        """log pi - sg(log pi): 0, with the gradient of log pi."""
        return log_ratio(self.logprobs, self.logprobs, self.loss_mask)

    def loss(
        self,
        terms: Tensor,
        *,
        ratio: Tensor | None = None,
        low: Tensor | None = None,
        high: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> Loss:
        """Return the terms of the loss tokens, and the stats.

        Args:
            terms: [T] float.
            ratio: [T] float, the ratio to report; None: each token's own.
            low, high: [T] bool, whether the ratio is clipped at the lower and the upper bound.
            dropped: [T] bool, whether the token is left out.
        """
        mask = self.loss_mask
        stats = self._ratio_stats(self.ratio if ratio is None else ratio)
        if high is not None:
            low = torch.zeros_like(high) if low is None else low
            clips = {"": low | high, "_low": low, "_high": high}
            stats |= {f"policy/clip{n}_frac": masked_mean(v, mask) for n, v in clips.items()}
        if dropped is not None:
            stats["policy/dropped_frac"] = masked_mean(dropped & mask, mask)
            mask = mask & ~dropped
        return keep(terms, mask), stats

    def _ratio_stats(self, ratio: Tensor) -> Stats:
        """Return the mean ratio, and the k1 estimate of KL(earlier || current), nats."""
        mask = self.loss_mask
        ratio = ratio.detach()
        if self.is_from_old:
            # The ratio may be that of a whole sequence, so the KL is computed from it too.
            kl = masked_mean(-ratio.log(), mask)
            return {"policy/ratio": masked_mean(ratio, mask), "policy/kl_old": kl}
        kl = masked_mean(-self.log_ratio, mask)
        return {"policy/rollout_ratio": masked_mean(ratio, mask), "policy/kl_rollout": kl}

    def clipped_surrogate(
        self, clip_low: float, clip_high: float, *, ratio: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the clipped surrogate objective of PPO.

        Args:
            ratio: [T] float, r; None: each token's own.
        Returns: min(r A, clip(r) A), and [T] bool for each bound, whether it is active.
        Raises: Refusal for bounds out of range.
        """
        check_clip(clip_low, clip_high)
        advantages = self.advantages
        ratio = self.ratio if ratio is None else ratio
        bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
        low = (advantages < 0) & (ratio < 1 - clip_low)
        high = (advantages > 0) & (ratio > 1 + clip_high)
        return torch.minimum(ratio * advantages, bounded * advantages), low, high

    def reinforce_terms(self, weight: Tensor | None = None) -> Tensor:
        """Return -weight A log pi: [T]. The weight must be detached; None for 1."""
        factor = self.advantages
        if weight is not None:
            factor = (weight * factor).to(self.logprobs.dtype)
        return -factor * keep(self.logprobs, self.loss_mask)


def shift_from_old(
    logprobs: Tensor, old_logprobs: Tensor, *, advantages: Tensor, loss_mask: Tensor
) -> PolicyShift:
    """Compare pi with pi_old, the policy at the batch's start; inputs are [T]."""
    log_r = log_ratio(logprobs, old_logprobs, loss_mask)
    advantages = keep(advantages.detach(), loss_mask)
    return PolicyShift(
        logprobs, old_logprobs.detach(), log_r, advantages, loss_mask, is_from_old=True
    )


def shift_from_rollout(
    logprobs: Tensor, rollout_logprobs: Tensor, *, advantages: Tensor, loss_mask: Tensor
) -> PolicyShift:
    """Compare pi with mu, the policy that sampled; inputs are [T]. See `sampled_logprobs`."""
    earlier_logprobs = sampled_logprobs(logprobs, rollout_logprobs)
    log_w = log_ratio(logprobs, earlier_logprobs, loss_mask)
    advantages = keep(advantages.detach(), loss_mask)
    return PolicyShift(logprobs, earlier_logprobs, log_w, advantages, loss_mask, is_from_old=False)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise Refusal for distances from 1 that cannot be the bounds of a ratio."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise Refusal(
            f"clip_low, clip_high: distances from a ratio of 1, must be in [0, 1] "
            f"and at least 0, got {clip_low}, {clip_high}"
        )


def check_level(level: str) -> None:
    """Raise Refusal for a level that is neither token nor sequence."""
    if level not in ("token", "sequence"):
        raise Refusal(f"level: must be token or sequence, got {level!r}")
