"""Losses on pairs that compare the policy with a reference; see the package for the inputs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.preference.shared import (
    Stats,
    check_beta,
    keep,
    log_ratio_of,
    masked_mean,
    pair_stats,
    pairs_in_loss,
)

Variant = Literal["sigmoid", "robust", "hinge", "ipo", "norm"]


def dpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
    variant: Variant = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Stats]:
    """Classify pairs by the margin h of log-ratios.

    Args:
        beta: strength of the tie to the reference, above 0.
        variant: `sigmoid` -log sigma(beta h); `robust` the same, made unbiased under labels
            flipped at the rate label_smoothing; `hinge` max(0, 1 - beta h); `ipo`
            (h - 1 / (2 beta))^2 and `norm` -log sigma(beta h), both with h =
            rho_w / |w| - rho_l / |l|.
        label_smoothing: e, assumed share of flipped labels, in [0, 0.5). sigmoid and norm:
            (1 - e) loss(h) + e loss(-h); robust: ((1 - e) loss(h) - e loss(-h)) / (1 - 2 e).
    Returns: terms [P] and stats. With policy = reference the sigmoid term is ln 2.
    Raises: ValueError for an option out of range or without a meaning in the variant.
    Source: arXiv 2305.18290 eq. 7; 2310.12036 (ipo; h per token, as its authors
        confirmed to TRL; OpenRLHF sums); 2403.00409 (robust); 2305.10425 (hinge);
        2411.15124 (norm).
    """
    check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing: must be in [0, 0.5), got {label_smoothing}")
    if label_smoothing and variant in ("hinge", "ipo"):
        raise ValueError(f"label_smoothing: has no meaning in the variant {variant}; set it to 0")
    kept = pairs_in_loss(chosen_lengths, rejected_lengths)
    chosen = log_ratio_of(chosen_logps, ref_chosen_logps, kept)
    rejected = log_ratio_of(rejected_logps, ref_rejected_logps, kept)
    if variant in ("ipo", "norm"):
        chosen = chosen / chosen_lengths.clamp(min=1)
        rejected = rejected / rejected_lengths.clamp(min=1)
    margin = beta * (chosen - rejected)
    smooth = label_smoothing
    if variant in ("sigmoid", "norm"):
        terms = -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)
    elif variant == "robust":
        terms = (smooth * logsigmoid(-margin) - (1 - smooth) * logsigmoid(margin)) / (
            1 - 2 * smooth
        )
    elif variant == "hinge":
        terms = torch.relu(1 - margin)
    elif variant == "ipo":
        terms = (chosen - rejected - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f"variant: must be sigmoid, robust, hinge, ipo or norm, got {variant!r}")
    stats = pair_stats(
        (beta * chosen, beta * rejected),
        (chosen_logps, rejected_logps),
        (chosen_lengths, rejected_lengths),
    )
    return keep(terms, kept), stats


def sppo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 1e-3,
) -> tuple[Tensor, Stats]:
    """Regress the log-ratios on +-1 / (2 beta): (rho_w - c)^2 + (rho_l + c)^2.

    Args:
        beta: above 0; the paper's eta is 1 / beta.
    Returns: terms [P] and stats.
    Raises: ValueError for an option out of range.
    Source: arXiv 2405.00675 (SPPO) with win rates 1 and 0 (hard labels).
    """
    check_beta(beta)
    target = 1 / (2 * beta)
    kept = pairs_in_loss(chosen_lengths, rejected_lengths)
    chosen = log_ratio_of(chosen_logps, ref_chosen_logps, kept)
    rejected = log_ratio_of(rejected_logps, ref_rejected_logps, kept)
    stats = pair_stats(
        (beta * chosen, beta * rejected),
        (chosen_logps, rejected_logps),
        (chosen_lengths, rejected_lengths),
    )
    return keep((chosen - target) ** 2 + (rejected + target) ** 2, kept), stats


def nca(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
) -> tuple[Tensor, Stats]:
    """Raise the chosen, hold both near the reference.

    -log sigma(a) - log sigma(-a) / 2 - log sigma(-b) / 2 with a = beta rho_w, b = beta rho_l.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: ValueError for an option out of range.
    Source: arXiv 2402.05369 (NCA, pairs).
    """
    chosen, rejected, kept, stats = _rewards(
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        chosen_lengths,
        rejected_lengths,
        beta=beta,
    )
    terms = -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2
    return keep(terms, kept), stats


def apo_zero(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
) -> tuple[Tensor, Stats]:
    """Raise the chosen, lower the rejected: 1 - sigma(beta rho_w) + sigma(beta rho_l).

    For chosen responses that are better than the model's own.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: ValueError for an option out of range.
    Source: arXiv 2408.06266 (APO-zero).
    """
    chosen, rejected, kept, stats = _rewards(
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        chosen_lengths,
        rejected_lengths,
        beta=beta,
    )
    return keep(torch.sigmoid(-chosen) + torch.sigmoid(rejected), kept), stats


def apo_down(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
) -> tuple[Tensor, Stats]:
    """Lower both, the rejected more: sigma(beta rho_w) + 1 - sigma(beta h).

    For chosen responses that are worse than the model's own.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: ValueError for an option out of range.
    Source: arXiv 2408.06266 (APO-down).
    """
    chosen, rejected, kept, stats = _rewards(
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        chosen_lengths,
        rejected_lengths,
        beta=beta,
    )
    return keep(torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen), kept), stats


def bco(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    mean_log_ratio: Tensor,
    beta: float = 0.1,
) -> tuple[Tensor, Stats]:
    """Classify each response by itself, against a common zero m.

    -log sigma(beta (rho_w - m)) - log sigma(-beta (rho_l - m)).

    Args:
        mean_log_ratio: [] float, nats: m, a running mean of preference/log_ratio over steps;
            0 to start with, or always for the form without a shift.
        beta: above 0.
    Returns: terms [P] and stats, also preference/log_ratio, the mean of rho_w and rho_l.
    Raises: ValueError for an option out of range.
    Source: arXiv 2404.04656 (BCO, pairs; its delta is beta m).
    """
    chosen, rejected, kept, stats = _rewards(
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        chosen_lengths,
        rejected_lengths,
        beta=beta,
    )
    shift = (beta * mean_log_ratio.detach()).to(chosen.dtype)
    terms = -logsigmoid(chosen - shift) - logsigmoid(shift - rejected)
    log_ratio = masked_mean((chosen + rejected) / (2 * beta), kept)
    return keep(terms, kept), stats | {"preference/log_ratio": log_ratio}


def _rewards(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor, Stats]:
    """Return beta rho of both sides [P], the mask of pairs in the loss [P], and the stats."""
    check_beta(beta)
    kept = pairs_in_loss(chosen_lengths, rejected_lengths)
    chosen = beta * log_ratio_of(chosen_logps, ref_chosen_logps, kept)
    rejected = beta * log_ratio_of(rejected_logps, ref_rejected_logps, kept)
    stats = pair_stats(
        (chosen, rejected), (chosen_logps, rejected_logps), (chosen_lengths, rejected_lengths)
    )
    return chosen, rejected, kept, stats
