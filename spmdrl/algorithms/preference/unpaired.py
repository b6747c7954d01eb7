"""KTO: a loss on single responses with a label, and the KL that it needs."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import log_ratio
from spmdrl.algorithms.masked import Stats, check_not_negative, check_positive, keep, masked_mean
from spmdrl.errors import Refusal

__all__ = ["kto"]


def kto(
    logps: Tensor,
    ref_logps: Tensor,
    *,
    is_chosen: Tensor,
    lengths: Tensor,
    kl: Tensor,
    beta: float = 0.1,
    chosen_weight: float = 1.0,
    rejected_weight: float = 1.0,
) -> tuple[Tensor, Stats]:
    """Compare the log-ratio of single responses with the mean KL z; S samples.

    Chosen: chosen_weight (1 - sigma(beta (rho - z))).
    Rejected: rejected_weight (1 - sigma(beta (z - rho))).

    Args:
        logps, ref_logps: [S] float, nats, summed over loss tokens; only `logps` has a gradient.
        is_chosen: [S] bool, the label.
        lengths: [S] int64, loss tokens; a response of length 0 is not in the loss.
        kl: [] float, nats: the quotient of `kto_kl` over the whole batch. A negative one counts as
            0.
        beta: above 0. chosen_weight, rejected_weight: at least 0.
    Returns: terms [S] and stats: preference/chosen_reward and preference/rejected_reward, beta rho
        of the samples with this label; preference/accuracy, 1 for a chosen sample with rho above z
        or a rejected one with rho below z, 1/2 if equal; preference/kl, z.
    Raises: Refusal for an option out of range.
    Source: arXiv 2402.01306 (KTO).
    """
    check_positive(beta=beta)
    check_not_negative(chosen_weight=chosen_weight, rejected_weight=rejected_weight)
    in_loss = lengths > 0
    # Clamp after the mean over the batch: clamping parts of it would bias the mean upwards.
    zero = kl.detach().clamp(min=0).to(logps.dtype)
    log_rho = log_ratio(logps, ref_logps, in_loss)
    distance = torch.where(is_chosen, log_rho - zero, zero - log_rho)
    loss = torch.sigmoid(-beta * distance)
    stats = {
        "preference/accuracy": masked_mean((distance.sign() + 1) / 2, in_loss),
        "preference/chosen_reward": masked_mean(beta * log_rho, in_loss & is_chosen),
        "preference/rejected_reward": masked_mean(beta * log_rho, in_loss & ~is_chosen),
        "preference/kl": masked_mean(zero.expand_as(logps), in_loss),
    }
    weighted = torch.where(is_chosen, chosen_weight * loss, rejected_weight * loss)
    return keep(weighted, in_loss), stats


def kto_kl(logps: Tensor, ref_logps: Tensor, *, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Sum log pi / pi_ref of responses that are scored after the prompt of another response.

    Args:
        logps, ref_logps: [S] float, nats, summed over the loss tokens of a response of another
            prompt (see `mismatched`), scored after the sample's own prompt.
        lengths: [S] int64, loss tokens of those responses; a length of 0 does not count.
    Returns: numerator and denominator, detached float64 scalars. Add both up over micro-batches
        and dp ranks, then divide: the quotient is the `kl` of `kto`, nats.
    Source: arXiv 2402.01306; its max with 0 is in `kto`.
    """
    in_loss = lengths > 0
    return masked_mean(log_ratio(logps.detach(), ref_logps, in_loss), in_loss)


def mismatched(prompt_ids: Tensor) -> Tensor:
    """Choose for each sample a response of another prompt.

    A shift by one place would not be enough, because samples of a prompt are next to each other.

    Args:
        prompt_ids: [S] int64, in any order; S samples.
    Returns: [S] int64, the index of the sample with that response. A permutation if all prompts
        have equally many samples.
    Raises: Refusal if all samples are of one prompt.
    """
    order = prompt_ids.argsort(stable=True)
    _, counts = torch.unique_consecutive(prompt_ids[order], return_counts=True)
    if len(counts) == 1:
        raise Refusal(
            f"all {len(prompt_ids)} samples are of prompt {int(prompt_ids[0])}; "
            "KTO's KL needs two prompts or more in a batch"
        )
    sizes = counts.repeat_interleave(counts)
    ends = counts.cumsum(0).repeat_interleave(counts)
    within = torch.arange(len(order), device=order.device) - (ends - sizes)
    # The samples of other prompts begin at the end of this prompt's samples, and wrap around.
    other = (ends + within % (len(order) - sizes)) % max(len(order), 1)
    return torch.empty_like(order).scatter(0, order, order[other])
