"""Control of the policy's entropy: `algorithm.entropy_control` of the objective `rl`.

T packed tokens, N loss tokens of the whole batch.
"""

from __future__ import annotations

import math

from torch import Tensor

from spmdrl.algorithms.masked import Stats, attach, check_share, masked_mean
from spmdrl.errors import Refusal

__all__ = ["adaptive_entropy_coef", "top_entropy"]


def top_entropy_statistics(entropy: Tensor, *, keep_frac: float = 0.2) -> dict[str, Tensor]:
    """Find the smallest entropy among the top share of the batch's loss tokens.

    Args:
        entropy: [N] float, nats, loss tokens of the whole batch.
        keep_frac: share to keep, rounded up to whole tokens.
    Returns: entropy_cut [] float64, nats; -inf for an empty batch.
    Raises: Refusal for a share out of range.
    Invariant under: permuting the column.
    """
    check_share(keep_frac=keep_frac)
    entropy = entropy.detach().double()
    if not len(entropy):
        return {"entropy_cut": entropy.new_tensor(float("-inf"))}
    # Without the slack, 0.07 * 100, which is a little above 7 in floats, would give 8.
    count = min(max(math.ceil(keep_frac * len(entropy) - 1e-9), 1), len(entropy))
    return {"entropy_cut": entropy.topk(count).values[-1]}


@attach(statistics=top_entropy_statistics)
def top_entropy(
    entropy: Tensor, *, loss_mask: Tensor, entropy_cut: Tensor, keep_frac: float = 0.2
) -> tuple[Tensor, Stats]:
    """Keep the tokens of high entropy, at which the response is undecided: weight 1, else 0.

    Args:
        entropy: [T] float, nats, of the policy's distribution at each token. A run uses that of
            the batch's start, so that all updates train the same tokens.
        loss_mask: [T] bool.
        entropy_cut: [] float64, nats, from top_entropy_statistics: tokens at or above it are kept.
        keep_frac: share of the loss tokens to keep, in (0, 1]; acts through entropy_cut.
    Returns: weights [T], detached, in the dtype of `entropy`, 0 off the loss mask; and stats. The
        weights multiply the terms of a loss. They do not change the counts that divide the loss.
    Raises: Refusal for a share out of range.
    Source: arXiv 2506.01939. Deviations: the cut is computed once per batch, at its start, not for
        each micro-batch. The divisor of the loss does not change, so the gradient of a token does
        not depend on how many other tokens are kept.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_share(keep_frac=keep_frac)
    dropped = loss_mask & (entropy.detach().double() < entropy_cut)
    stats = {"policy/low_entropy_frac": masked_mean(dropped.double(), loss_mask)}
    return (loss_mask & ~dropped).to(entropy.dtype), stats


def adaptive_entropy_coef(
    coef: float,
    *,
    entropy: float,
    target: float,
    delta: float,
    lower: float = 0.0,
    upper: float = 1.0,
) -> tuple[float, float]:
    """Move the entropy bonus's coefficient one step towards the target entropy.

    Args:
        coef: current coefficient.
        entropy: measured mean, nats. If it is not finite (a skipped update), the coefficient does
            not change, and 0 is applied.
        target: nats. delta: size of a step. lower, upper: bounds on the coefficient.
    Returns: two coefficients. The first is for the next call: delta higher if the entropy is below
        the target, delta lower if above. The second is to be applied now: the same, but 0 while
        the entropy is above the target.
    Raises: Refusal for a target, delta or bounds out of range.
    Source: arXiv 2505.22312 (Skywork-OR1), adaptive entropy control. Deviation: an upper bound,
        so that a bonus without effect does not grow forever.
    """
    if not math.isfinite(target):
        raise Refusal(f"target: must be finite, got {target}")
    if not (delta > 0 and math.isfinite(delta)):
        raise Refusal(f"delta: must be above 0, got {delta}")
    if not 0 <= lower <= upper:
        raise Refusal(f"lower, upper: must be 0 <= lower <= upper, got {lower}, {upper}")
    if not math.isfinite(entropy):
        return coef, 0.0
    step = 0.0
    if entropy < target:
        step = delta
    elif entropy > target:
        step = -delta
    coef = min(max(coef + step, lower), upper)
    return coef, coef if entropy <= target else 0.0
