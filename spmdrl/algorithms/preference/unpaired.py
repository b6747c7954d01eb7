"""KTO: a loss on single responses labelled good or bad, and the KL that it compares with."""

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
    """Judge single responses against the mean KL z, S samples.

    Chosen: chosen_weight (1 - sigma(beta (rho - z))); rejected: rejected_weight
    (1 - sigma(beta (z - rho))).

    Args:
        logps, ref_logps: [S] float, nats, summed over loss tokens; ref is constant.
        is_chosen: [S] bool, the label. lengths: [S] int64, loss tokens; 0 is not in the loss.
        kl: [] float, nats: the quotient of `kto_kl` over the whole batch; below 0 counts as 0.
        beta: above 0. chosen_weight, rejected_weight: at least 0.
    Returns: terms [S] and stats: preference/chosen_reward and preference/rejected_reward,
        beta rho of each label's samples; preference/accuracy, rho above z for chosen ones,
        below for rejected ones, 1/2 if equal; preference/kl, z.
    Raises: Refusal for an option out of range.
    Source: arXiv 2402.01306 (KTO).
    """
    check_positive(beta=beta)
    check_not_negative(chosen_weight=chosen_weight, rejected_weight=rejected_weight)
    kept = lengths > 0
    # Clamped here, after the mean over the batch: a clamp on parts of it is biased upwards.
    zero = kl.detach().clamp(min=0).to(logps.dtype)
    log_rho = log_ratio(logps, ref_logps, kept)
    distance = torch.where(is_chosen, log_rho - zero, zero - log_rho)
    loss = torch.sigmoid(-beta * distance)
    stats = {
        "preference/accuracy": masked_mean((distance.sign() + 1) / 2, kept),
        "preference/chosen_reward": masked_mean(beta * log_rho, kept & is_chosen),
        "preference/rejected_reward": masked_mean(beta * log_rho, kept & ~is_chosen),
        "preference/kl": masked_mean(zero.expand_as(logps), kept),
    }
    weighted = torch.where(is_chosen, chosen_weight * loss, rejected_weight * loss)
    return keep(weighted, kept), stats


def kto_kl(logps: Tensor, ref_logps: Tensor, *, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Sum log pi / pi_ref of responses put to prompts that they do not belong to.

    Args:
        logps, ref_logps: [S] float, nats, summed over the tokens of the response that
            `mismatched` names, given the sample's own prompt.
        lengths: [S] int64, loss tokens of those responses; 0 enters nothing.
    Returns: numerator and denominator, detached float64 scalars. Add both up over
        micro-batches and dp ranks, then divide: the quotient is `kto`'s kl, nats.
    Source: arXiv 2402.01306; its max with 0 is in `kto`.
    """
    kept = lengths > 0
    return masked_mean(log_ratio(logps.detach(), ref_logps, kept), kept)


def mismatched(prompt_ids: Tensor) -> Tensor:
    """Give each sample a response of another prompt.

    A shift by one place is not enough: samples of one prompt are next to each other.

    Args:
        prompt_ids: [S] int64, in any order; S samples.
    Returns: [S] int64, position of the sample whose response to take. A permutation if all
        prompts have equally many samples.
    Raises: Refusal if there are samples, all of one prompt.
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
    # The others, counted on from the end of one's own prompt and around.
    other = (ends + within % (len(order) - sizes)) % max(len(order), 1)
    return torch.empty_like(order).scatter(0, order, order[other])
