"""Estimates of KL(pi || pi_ref), per token, from tokens that the policy sampled.

d = log pi - log pi_ref at the sampled token and r = pi / pi_old. Exponents are
clamped: log r to +-20 and -d to at most 20. The gradient does not go through the clamp, so it does
not vanish there. Over tokens that pi samples after a prefix, the mean of d is the KL, and the mean
of d * grad log pi is its gradient. As a loss without a ratio, the estimates have these properties:

    estimate          value           expected gradient for tokens sampled from pi
    k1 = d            unbiased        0: grad log pi has mean 0. No penalty at all.
    k2 = d^2 / 2      biased          the KL's
    k3 = e^-d + d - 1 unbiased, >= 0  that of KL(pi_ref || pi), the other direction

Those expectations need tokens from pi itself. `unbiased=True` weighs with r, for tokens from
pi_old, and makes the expected gradient the KL's for all three: k1 and k3 times a live r
(gradient r (d + 1) and r d, times grad log pi), k2 times a detached r (gradient r d; a live r
would add r k2). So k3 has the right value and the least noise. Gradients are of each token's
KL at the prefix as sampled: they leave out how a token changes the KL of later ones. For
that, put the KL in the reward: there no gradient flows, and k1 is the estimate to take.

`loss_mask` [T] bool: where it is False, term and gradient are exactly 0 for any input.
Invariant under: dp size, micro-batching, packing order, padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import MAX_LOG_RATIO, log_ratio, ratio_of
from spmdrl.algorithms.masked import Stats, keep, making

__all__ = ["k1", "k2", "k3"]
_MAX_NATS = 1000.0  # only for a reference that gives a token no probability at all


class Apart(NamedTuple):
    """How far T tokens are from the reference, and from the policy that sampled them; detached."""

    d: Tensor
    r: Tensor
    own: Tensor
    """log pi - sg(log pi): 0, with the gradient of log pi."""
    loss_mask: Tensor

    def terms(self, value: Tensor, slope: Tensor) -> Tensor:
        """Return values [T] with the given derivatives by log pi: a clamp inside would take them
        away where the policy is farthest off."""
        return keep(value + slope * self.own, self.loss_mask)


def apart_of(
    logprobs: Tensor, ref_logprobs: Tensor, *, old_logprobs: Tensor, loss_mask: Tensor
) -> Apart:
    """Compare the policy's logprobs with the others, [T] float each, nats."""
    fixed = logprobs.detach()
    d = log_ratio(fixed, ref_logprobs, loss_mask).clamp(-_MAX_NATS, _MAX_NATS)
    r = ratio_of(log_ratio(fixed, old_logprobs, loss_mask))
    return Apart(d, r, log_ratio(logprobs, logprobs, loss_mask), loss_mask)


@making(apart=apart_of)
def k1(apart: Apart, *, unbiased: bool = False) -> Tensor:
    """Estimate the KL by the log-ratio: d, or r d. As a loss it needs `unbiased`.

    Args:
        logprobs: [T] float, nats. ref_logprobs: [T] float, nats, the reference policy's.
        old_logprobs: [T] float, nats, of the policy that sampled; used if unbiased.
        loss_mask: [T] bool.
        unbiased: multiply by r = pi / pi_old, live: gradient r (d + 1) grad log pi.
    Returns: terms [T], nats, in the dtype of `logprobs`. Negative for some tokens.
    Source: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    d = apart.d
    r = apart.r
    return apart.terms(r * d, r * (d + 1)) if unbiased else apart.terms(d, torch.ones_like(d))


@making(apart=apart_of)
def k2(apart: Apart, *, unbiased: bool = False) -> Tensor:
    """Estimate the KL by half the squared log-ratio: d^2 / 2, or sg(r) d^2 / 2.

    Args:
        logprobs: [T] float, nats. ref_logprobs: [T] float, nats, the reference policy's.
        old_logprobs: [T] float, nats, of the policy that sampled; used if unbiased.
        loss_mask: [T] bool.
        unbiased: multiply by r = pi / pi_old, detached: gradient r d grad log pi. The value
            stays biased: it is second order in pi - pi_ref alone.
    Returns: terms [T], nats, in the dtype of `logprobs`, at least 0.
    Source: Schulman 2020, joschu.net/blog/kl-approx.html; 2501.03262 as a loss.
    """
    weight = apart.r if unbiased else torch.ones_like(apart.r)
    return apart.terms(weight * apart.d**2 / 2, weight * apart.d)


@making(apart=apart_of)
def k3(apart: Apart, *, unbiased: bool = False) -> Tensor:
    """Estimate the KL without a negative term: e^-d + d - 1, or r times that.

    Args:
        logprobs: [T] float, nats. ref_logprobs: [T] float, nats, the reference policy's.
        old_logprobs: [T] float, nats, of the policy that sampled; used if unbiased.
        loss_mask: [T] bool.
        unbiased: multiply by r = pi / pi_old, live: gradient r d grad log pi.
    Returns: terms [T], nats, in the dtype of `logprobs`, at least 0.
    Source: Schulman 2020, joschu.net/blog/kl-approx.html; 2402.03300 eq. 4 as a loss;
        2512.02556 for `unbiased`.
    """
    d = apart.d
    r = apart.r
    # expm1: e^-d - 1 loses all digits near d = 0, where most tokens are.
    above = torch.expm1(-d.clamp(min=-MAX_LOG_RATIO))
    return apart.terms(r * (above + d), r * d) if unbiased else apart.terms(above + d, -above)


def kl_stats(logprobs: Tensor, ref_logprobs: Tensor, *, loss_mask: Tensor) -> Stats:
    """Measure the distance from the reference on one micro-batch.

    Args:
        logprobs, ref_logprobs: [T] float, nats. loss_mask: [T] bool.
    Returns: {name: (numerator, denominator)}, detached float64 scalars that add up over
        micro-batches and dp ranks: policy/kl_ref (k1) and policy/kl_ref_k3, nats per token.
    """
    inputs = (logprobs.detach().double(), ref_logprobs.detach().double())
    count = loss_mask.double().sum()
    terms = {"policy/kl_ref": k1, "policy/kl_ref_k3": k3}
    return {
        name: (k(*inputs, old_logprobs=inputs[0], loss_mask=loss_mask).sum(), count)
        for name, k in terms.items()
    }
