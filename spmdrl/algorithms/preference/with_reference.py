"""Losses on pairs that compare the policy with a reference; see the package for the inputs."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.masked import check_positive, check_unit, derive, masked_mean
from spmdrl.algorithms.preference.shared import (
    Loss,
    Pairs,
    check_smoothing,
    extend_linearly,
    pairs_with_reference,
    smoothed_loss,
)
from spmdrl.errors import Refusal

__all__ = ["apo_down", "apo_zero", "bco", "discopop", "dpo", "exo_pair", "nca", "sppo"]

Variant = Literal["sigmoid", "robust", "hinge", "ipo", "norm"]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@derive(pairs=pairs_with_reference)
def dpo(
    pairs: Pairs,
    *,
    beta: float = 0.1,
    variant: Variant = "sigmoid",
    label_smoothing: float = 0.0,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Loss:
    """Classify pairs by the margin h of their log-ratios, or of f'(e^rho) for an f-divergence.

    Args:
        beta: strength of the penalty for leaving the reference, above 0.
        variant: `sigmoid`: -log sigma(beta h). `robust`: the same, unbiased if a share
            label_smoothing of the labels is flipped. `hinge`: max(0, 1 - beta h). `ipo`:
            (h - 1 / (2 beta))^2, and `norm`: -log sigma(beta h), both with
            h = rho_w / |w| - rho_l / |l|.
        label_smoothing: e, assumed share of flipped labels, in [0, 0.5). sigmoid and norm:
            (1 - e) loss(h) + e loss(-h); robust: ((1 - e) loss(h) - e loss(-h)) / (1 - 2 e).
        f_divergence_type: the divergence from the reference. h is the difference of f'(u) with
            u = e^rho: rho (reverse_kl), -1 / u (forward_kl), log sigma(rho) (js_divergence),
            (u^(a - 1) - 1) / (a - 1) (alpha_divergence), up to a constant. Not for ipo and norm.
        f_alpha_divergence_coef: a, in [0, 1]: forward_kl at 0, reverse_kl at 1. The paper's alpha
            is 1 - a.
    Returns: terms [P] and stats, with beta f'(u) as rewards. If policy and reference are equal, the
        sigmoid term is ln 2.
    Raises: Refusal for an option out of range, or one that the variant does not have.
    Source: arXiv 2305.18290 eq. 7; 2310.12036 (ipo; h per token, as its authors confirmed to TRL,
        where OpenRLHF has sums); 2403.00409 (robust); 2305.10425 (hinge); 2411.15124 (norm);
        2309.16240 (f-divergences), with a as in TRL. Deviation: above e^20, an exponential is
        continued by its tangent, so that it does not overflow and keeps a gradient.
    """
    check_smoothing(label_smoothing)
    if label_smoothing and variant in ("hinge", "ipo"):
        raise Refusal(f"label_smoothing: has no meaning in the variant {variant}; set it to 0")
    if f_divergence_type != "reverse_kl" and variant in ("ipo", "norm"):
        raise Refusal(f"f_divergence_type: {f_divergence_type} has no meaning in {variant}")
    rho = pairs.per_token(pairs.log_ratios) if variant in ("ipo", "norm") else pairs.log_ratios
    rho = [_f_slope(r, f_divergence_type, alpha=f_alpha_divergence_coef) for r in rho]
    chosen, rejected = rho
    margin = beta * (chosen - rejected)
    if variant in ("sigmoid", "norm"):
        terms = smoothed_loss(margin, label_smoothing)
    elif variant == "robust":
        e = label_smoothing
        terms = (e * logsigmoid(-margin) - (1 - e) * logsigmoid(margin)) / (1 - 2 * e)
    elif variant == "hinge":
        terms = torch.relu(1 - margin)
    elif variant == "ipo":
        terms = (chosen - rejected - 1 / (2 * beta)) ** 2
    else:
        raise Refusal(f"variant: must be sigmoid, robust, hinge, ipo or norm, got {variant!r}")
    return pairs.loss(terms, pairs.rewards(rho))


def _f_slope(rho: Tensor, kind: Divergence, *, alpha: float) -> Tensor:
    """Return f'(e^rho) up to a constant."""
    check_unit(f_alpha_divergence_coef=alpha)
    if kind != "alpha_divergence" and alpha != 0.5:
        raise Refusal(
            f"f_alpha_divergence_coef: {alpha} has no meaning under f_divergence_type {kind}; "
            "leave it out, or take alpha_divergence"
        )
    if kind == "js_divergence":
        return logsigmoid(rho)
    alpha = {"reverse_kl": 1.0, "forward_kl": 0.0}.get(kind, alpha)
    return rho if alpha == 1 else extend_linearly(torch.expm1, (alpha - 1) * rho) / (alpha - 1)


@derive(pairs=pairs_with_reference)
def exo_pair(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Loss:
    """Match preferences by a reverse KL: KL((q, 1 - q), (1 - e, e)) with q = sigma(beta h).

    Args:
        beta: above 0.
        label_smoothing: e, in (0, 0.5): at 0 the KL is infinite.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2402.00856 eq. 16 (EXO-pref) for two responses.
    """
    if not 0 < label_smoothing < 0.5:
        raise Refusal(f"label_smoothing: must be in (0, 0.5), got {label_smoothing}")
    chosen, rejected = pairs.rewards()
    margin = chosen - rejected
    smooth = label_smoothing
    towards = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-smooth))
    away = torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(smooth))
    return pairs.loss(towards + away)


@derive(pairs=pairs_with_reference)
def discopop(pairs: Pairs, *, beta: float = 0.05, discopop_tau: float = 0.05) -> Loss:
    """Blend two losses: -(1 - m) log sigma(x) + m e^-x with x = beta h and m = sigma(x / tau).

    Args:
        beta: above 0. discopop_tau: temperature of the blend, above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2406.08414 eq. 5 (DiscoPOP, its log-ratio modulated loss). Deviation: above e^20,
        an exponential is continued by its tangent; this happens only with a tau above 1.
    """
    check_positive(discopop_tau=discopop_tau)
    chosen, rejected = pairs.rewards()
    margin = chosen - rejected
    blend = margin / discopop_tau
    # m e^-x as one exponential, because e^-x alone overflows.
    exponential = extend_linearly(torch.exp, logsigmoid(blend) - margin)
    return pairs.loss(-logsigmoid(margin) * torch.sigmoid(-blend) + exponential)


@derive(pairs=pairs_with_reference)
def sppo(pairs: Pairs, *, beta: float = 1e-3) -> Loss:
    """Regress the log-ratios on +-1 / (2 beta): (rho_w - c)^2 + (rho_l + c)^2.

    Args:
        beta: above 0; the paper's eta is 1 / beta.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2405.00675 (SPPO) with win rates 1 and 0 (hard labels).
    """
    chosen, rejected = pairs.log_ratios
    target = 1 / (2 * beta)
    return pairs.loss((chosen - target) ** 2 + (rejected + target) ** 2)


@derive(pairs=pairs_with_reference)
def nca(pairs: Pairs, *, beta: float = 0.1) -> Loss:
    """Raise the chosen response and keep both near the reference.

    -log sigma(a) - log sigma(-a) / 2 - log sigma(-b) / 2 with a = beta rho_w, b = beta rho_l.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2402.05369 (NCA, pairs).
    """
    chosen, rejected = pairs.rewards()
    terms = -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2
    return pairs.loss(terms)


@derive(pairs=pairs_with_reference)
def apo_zero(pairs: Pairs, *, beta: float = 0.1) -> Loss:
    """Raise the chosen and lower the rejected: 1 - sigma(beta rho_w) + sigma(beta rho_l).

    For chosen responses that are better than the model's own.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2408.06266 (APO-zero).
    """
    chosen, rejected = pairs.rewards()
    return pairs.loss(torch.sigmoid(-chosen) + torch.sigmoid(rejected))


@derive(pairs=pairs_with_reference)
def apo_down(pairs: Pairs, *, beta: float = 0.1) -> Loss:
    """Lower both, the rejected more: sigma(beta rho_w) + 1 - sigma(beta h).

    For chosen responses that are worse than the model's own.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2408.06266 (APO-down).
    """
    chosen, rejected = pairs.rewards()
    return pairs.loss(torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen))


@derive(pairs=pairs_with_reference)
def bco(pairs: Pairs, *, mean_log_ratio: Tensor, beta: float = 0.1) -> Loss:
    """Classify each response alone, by its distance from a running mean m.

    -log sigma(beta (rho_w - m)) - log sigma(-beta (rho_l - m)).

    Args:
        mean_log_ratio: [] float, nats: m, a running mean of preference/log_ratio over steps. It
            starts at 0. If it stays 0, this is the form of the loss without a shift.
        beta: above 0.
    Returns: terms [P] and stats, also preference/log_ratio, the mean of rho_w and rho_l.
    Raises: Refusal for an option out of range.
    Source: arXiv 2404.04656 (BCO, pairs; its delta is beta m).
    """
    chosen, rejected = pairs.rewards()
    shift = (beta * mean_log_ratio.detach()).to(chosen.dtype)
    terms, stats = pairs.loss(-logsigmoid(chosen - shift) - logsigmoid(shift - rejected))
    log_ratio = masked_mean((chosen + rejected) / (2 * beta), pairs.in_loss)
    return terms, stats | {"preference/log_ratio": log_ratio}
