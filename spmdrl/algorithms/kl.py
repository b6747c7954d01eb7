"""Estimates of KL(pi || pi_ref), per token, from tokens that the policy sampled.

d = log pi - log pi_ref at the sampled token, and r = pi / pi_old. Exponents are clamped: log r to
+-20, and -d to at most 20. The gradient does not pass through the clamp, so it does not vanish
there. Over tokens that pi samples after a prefix, the mean of d is the KL, and the mean of
d * grad log pi is its gradient. As a loss without a ratio, the estimates have these properties:

    estimate          value           expected gradient for tokens sampled from pi
    k1 = d            unbiased        0: grad log pi has mean 0. No penalty at all.
    k2 = d^2 / 2      biased          the KL's
    k3 = e^-d + d - 1 unbiased, >= 0  that of KL(pi_ref || pi), the other direction

These expectations hold for tokens that pi sampled. `unbiased=True` is for tokens that pi_old
sampled: it multiplies by r, and the expected gradient is then the KL's for all three. k1 and k3 are
multiplied by r with its gradient; the gradients are r (d + 1) and r d, times grad log pi. k2 is
multiplied by a detached r; the gradient is r d (with the gradient of r it would also have r k2).
So k3 has the right value and the least noise.

The gradient is that of each token's KL after a fixed prefix. It does not include how the token
changes the KL of later tokens. To include that, put the KL in the reward; no gradient flows there,
and k1 is the right estimate.

`loss_mask` [T] bool: where it is False, term and gradient are exactly 0 for any input.
Invariant under: dp size, micro-batching, packing order, padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import MAX_LOG_RATIO, log_ratio, ratio_of
from spmdrl.algorithms.masked import Stats, derive, keep

__all__ = ["k1", "k2", "k3"]
_MAX_NATS = 1000.0  # reached only where the reference gives a token probability 0


class ReferenceGap(NamedTuple):
    """The log-ratio to the reference and the ratio to the sampling policy at T tokens, detached."""

    d: Tensor
    r: Tensor
    zero_with_grad: Tensor
    """log pi - sg(log pi): 0, with the gradient of log pi."""
    loss_mask: Tensor

    def terms(self, value: Tensor, slope: Tensor) -> Tensor:
        """Return values [T] whose derivative by log pi is `slope`."""
        # Autograd through the clamps would give 0 where the policy is farthest from the reference.
        return keep(value + slope * self.zero_with_grad, self.loss_mask)


def reference_gap(
    logprobs: Tensor, ref_logprobs: Tensor, *, old_logprobs: Tensor, loss_mask: Tensor
) -> ReferenceGap:
    """Compare the policy's logprobs with the reference's and the old ones, [T] float, nats."""
    fixed = logprobs.detach()
    d = log_ratio(fixed, ref_logprobs, loss_mask).clamp(-_MAX_NATS, _MAX_NATS)
    r = ratio_of(log_ratio(fixed, old_logprobs, loss_mask))
    return ReferenceGap(d, r, log_ratio(logprobs, logprobs, loss_mask), loss_mask)


@derive(gap=reference_gap)
def k1(gap: ReferenceGap, *, unbiased: bool = False) -> Tensor:
    """Estimate the KL by the log-ratio: d, or r d. As a loss it needs `unbiased`.

    Args:
        logprobs: [T] float, nats. ref_logprobs: [T] float, nats, the reference policy's.
        old_logprobs: [T] float, nats, of the policy that sampled; used if unbiased.
        loss_mask: [T] bool.
        unbiased: multiply by r = pi / pi_old, not detached: gradient r (d + 1) grad log pi.
    Returns: terms [T], nats, in the dtype of `logprobs`. Negative for some tokens.
    Source: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    d = gap.d
    r = gap.r
    return gap.terms(r * d, r * (d + 1)) if unbiased else gap.terms(d, torch.ones_like(d))


@derive(gap=reference_gap)
def k2(gap: ReferenceGap, *, unbiased: bool = False) -> Tensor:
    """Estimate the KL by half the squared log-ratio: d^2 / 2, or sg(r) d^2 / 2.

    Args:
        logprobs: [T] float, nats. ref_logprobs: [T] float, nats, the reference policy's.
        old_logprobs: [T] float, nats, of the policy that sampled; used if unbiased.
        loss_mask: [T] bool.
        unbiased: multiply by r = pi / pi_old, detached: gradient r d grad log pi. The value
            is still biased: it equals the KL only to second order in pi - pi_ref.
    Returns: terms [T], nats, in the dtype of `logprobs`, at least 0.
    Source: Schulman 2020, joschu.net/blog/kl-approx.html; 2501.03262 as a loss.
    """
    weight = gap.r if unbiased else torch.ones_like(gap.r)
    return gap.terms(weight * gap.d**2 / 2, weight * gap.d)


@derive(gap=reference_gap)
def k3(gap: ReferenceGap, *, unbiased: bool = False) -> Tensor:
    """Estimate the KL without a negative term: e^-d + d - 1, or r times that.

    Args:
        logprobs: [T] float, nats. ref_logprobs: [T] float, nats, the reference policy's.
        old_logprobs: [T] float, nats, of the policy that sampled; used if unbiased.
        loss_mask: [T] bool.
        unbiased: multiply by r = pi / pi_old, not detached: gradient r d grad log pi.
    Returns: terms [T], nats, in the dtype of `logprobs`, at least 0.
    Source: Schulman 2020, joschu.net/blog/kl-approx.html; 2402.03300 eq. 4 as a loss;
        2512.02556 for `unbiased`.
    """
    d = gap.d
    r = gap.r
    # expm1, because e^-d - 1 loses all digits near d = 0, where most tokens are.
    above = torch.expm1(-d.clamp(min=-MAX_LOG_RATIO))
    return gap.terms(r * (above + d), r * d) if unbiased else gap.terms(above + d, -above)


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
