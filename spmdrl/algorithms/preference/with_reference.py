"""Losses on pairs that compare the policy with a reference; see the package for the inputs."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.masked import check_positive, check_unit, making, masked_mean
from spmdrl.algorithms.preference.shared import (
    Loss,
    Pairs,
    capped,
    check_smoothing,
    compared,
    smoothed,
)
from spmdrl.errors import Refusal

__all__ = ["apo_down", "apo_zero", "bco", "discopop", "dpo", "exo_pair", "nca", "sppo"]

Variant = Literal["sigmoid", "robust", "hinge", "ipo", "norm"]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@making(pairs=compared)
def dpo(
    pairs: Pairs,
    *,
    beta: float = 0.1,
    variant: Variant = "sigmoid",
    label_smoothing: float = 0.0,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> Loss:
    """Classify pairs by the margin h of log-ratios, or of what another divergence makes of them.

    Args:
        beta: strength of the tie to the reference, above 0.
        variant: `sigmoid` -log sigma(beta h); `robust` the same, made unbiased under labels
            flipped at the rate label_smoothing; `hinge` max(0, 1 - beta h); `ipo`
            (h - 1 / (2 beta))^2 and `norm` -log sigma(beta h), both with h =
            rho_w / |w| - rho_l / |l|.
        label_smoothing: e, assumed share of flipped labels, in [0, 0.5). sigmoid and norm:
            (1 - e) loss(h) + e loss(-h); robust: ((1 - e) loss(h) - e loss(-h)) / (1 - 2 e).
        f_divergence_type: what ties the policy to the reference. h is the difference of f'(u), u =
            e^rho: rho (reverse_kl), -1 / u (forward_kl), log sigma(rho) (js_divergence),
            (u^(a - 1) - 1) / (a - 1) (alpha_divergence), up to a constant. Not for ipo and norm.
        f_alpha_divergence_coef: a, in [0, 1]: forward_kl at 0, reverse_kl at 1; the paper's is
            1 - a.
    Returns: terms [P] and stats, whose rewards are beta f'(u). With policy = reference the sigmoid
        term is ln 2.
    Raises: Refusal for an option out of range or without a meaning in the variant.
    Source: arXiv 2305.18290 eq. 7; 2310.12036 (ipo; h per token, as its authors
        confirmed to TRL; OpenRLHF sums); 2403.00409 (robust); 2305.10425 (hinge);
        2411.15124 (norm); 2309.16240 (f-divergences), with a as in TRL. Deviation: an exponential
        above e^20 goes on as its tangent there, so that its pull neither ends nor overflows.
    """
    check_smoothing(label_smoothing)
    if label_smoothing and variant in ("hinge", "ipo"):
        raise Refusal(f"label_smoothing: has no meaning in the variant {variant}; set it to 0")
    if f_divergence_type != "reverse_kl" and variant in ("ipo", "norm"):
        raise Refusal(f"f_divergence_type: {f_divergence_type} has no meaning in {variant}")
    rho = pairs.per_token(pairs.own) if variant in ("ipo", "norm") else pairs.own
    rho = [_f_slope(r, f_divergence_type, alpha=f_alpha_divergence_coef) for r in rho]
    chosen, rejected = rho
    margin = beta * (chosen - rejected)
    smooth = label_smoothing
    if variant in ("sigmoid", "norm"):
        terms = smoothed(margin, smooth)
    elif variant == "robust":
        terms = (smooth * logsigmoid(-margin) - (1 - smooth) * logsigmoid(margin)) / (
            1 - 2 * smooth
        )
    elif variant == "hinge":
        terms = torch.relu(1 - margin)
    elif variant == "ipo":
        terms = (chosen - rejected - 1 / (2 * beta)) ** 2
    else:
        raise Refusal(f"variant: must be sigmoid, robust, hinge, ipo or norm, got {variant!r}")
    return pairs.loss(terms, pairs.scaled(rho))


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
    return rho if alpha == 1 else capped(torch.expm1, (alpha - 1) * rho) / (alpha - 1)


@making(pairs=compared)
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
    chosen, rejected = pairs.scaled()
    margin = chosen - rejected
    smooth = label_smoothing
    towards = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-smooth))
    away = torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(smooth))
    return pairs.loss(towards + away)


@making(pairs=compared)
def discopop(pairs: Pairs, *, beta: float = 0.05, discopop_tau: float = 0.05) -> Loss:
    """Blend two losses: -(1 - m) log sigma(x) + m e^-x with x = beta h and m = sigma(x / tau).

    Args:
        beta: above 0. discopop_tau: temperature of the blend, above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2406.08414 eq. 5 (DiscoPOP, its log-ratio modulated loss). Deviation: an
        exponential above e^20, which only a tau above 1 can give, goes on as its tangent there.
    """
    check_positive(discopop_tau=discopop_tau)
    chosen, rejected = pairs.scaled()
    margin = chosen - rejected
    blend = margin / discopop_tau
    # One exponent: e^-x alone overflows.
    exponential = capped(torch.exp, logsigmoid(blend) - margin)
    return pairs.loss(-logsigmoid(margin) * torch.sigmoid(-blend) + exponential)


@making(pairs=compared)
def sppo(pairs: Pairs, *, beta: float = 1e-3) -> Loss:
    """Regress the log-ratios on +-1 / (2 beta): (rho_w - c)^2 + (rho_l + c)^2.

    Args:
        beta: above 0; the paper's eta is 1 / beta.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2405.00675 (SPPO) with win rates 1 and 0 (hard labels).
    """
    (chosen, rejected), target = pairs.own, 1 / (2 * beta)
    return pairs.loss((chosen - target) ** 2 + (rejected + target) ** 2)


@making(pairs=compared)
def nca(pairs: Pairs, *, beta: float = 0.1) -> Loss:
    """Raise the chosen, hold both near the reference.

    -log sigma(a) - log sigma(-a) / 2 - log sigma(-b) / 2 with a = beta rho_w, b = beta rho_l.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2402.05369 (NCA, pairs).
    """
    chosen, rejected = pairs.scaled()
    terms = -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2
    return pairs.loss(terms)


@making(pairs=compared)
def apo_zero(pairs: Pairs, *, beta: float = 0.1) -> Loss:
    """Raise the chosen, lower the rejected: 1 - sigma(beta rho_w) + sigma(beta rho_l).

    For chosen responses that are better than the model's own.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2408.06266 (APO-zero).
    """
    chosen, rejected = pairs.scaled()
    return pairs.loss(torch.sigmoid(-chosen) + torch.sigmoid(rejected))


@making(pairs=compared)
def apo_down(pairs: Pairs, *, beta: float = 0.1) -> Loss:
    """Lower both, the rejected more: sigma(beta rho_w) + 1 - sigma(beta h).

    For chosen responses that are worse than the model's own.

    Args:
        beta: above 0.
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2408.06266 (APO-down).
    """
    chosen, rejected = pairs.scaled()
    return pairs.loss(torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen))


@making(pairs=compared)
def bco(pairs: Pairs, *, mean_log_ratio: Tensor, beta: float = 0.1) -> Loss:
    """Classify each response on its own, against a common zero m.

    -log sigma(beta (rho_w - m)) - log sigma(-beta (rho_l - m)).

    Args:
        mean_log_ratio: [] float, nats: m, a running mean of preference/log_ratio over steps;
            0 to start with, or always for the form without a shift.
        beta: above 0.
    Returns: terms [P] and stats, also preference/log_ratio, the mean of rho_w and rho_l.
    Raises: Refusal for an option out of range.
    Source: arXiv 2404.04656 (BCO, pairs; its delta is beta m).
    """
    chosen, rejected = pairs.scaled()
    shift = (beta * mean_log_ratio.detach()).to(chosen.dtype)
    terms, stats = pairs.loss(-logsigmoid(chosen - shift) - logsigmoid(shift - rejected))
    log_ratio = masked_mean((chosen + rejected) / (2 * beta), pairs.kept)
    return terms, stats | {"preference/log_ratio": log_ratio}
