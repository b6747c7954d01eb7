"""Every loss, value and gradient, against plain loops written from the papers.

One Python float at a time: a term, and its derivative by the logprob, worked out by hand.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.test_losses import CASES, call
from tests.helpers.ragged import Ragged, assert_loop, ragged

DEFAULTS = {
    "ppo_clip": dict(clip_low=0.2, clip_high=0.2),
    "sapo": dict(tau_pos=1.0, tau_neg=1.05),
    "cispo": dict(ratio_low=0.0, ratio_high=5.0),
    "tis_pg": dict(upper=1.0),
    "aipo": dict(upper=4.0),
    "topr": dict(level="sequence", upper=1.0),
    "kimi": dict(level="sequence", tau=0.1),
    "dro": dict(level="token", beta=0.05),
    "gspo": dict(clip_low=3e-4, clip_high=4e-4),
    "gspo_token": {},
    "luspo": {},
    "gmpo": dict(clip_low=0.4, clip_high=0.4),
    "vespo": dict(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0),
    "dppo_tv": dict(threshold_low=0.15, threshold_high=0.15),
    "dppo_kl": dict(threshold_low=0.05, threshold_high=0.05),
    "decoupled_ppo": dict(clip_low=0.2, clip_high=0.2, weight_cap=0.0),
    "a3po": dict(clip_low=0.2, clip_high=0.2, weight_cap=0.0),
    "m2po": dict(threshold=0.04),
    "clip_cov": dict(clip_low=0.2, clip_high=0.2),
    "kl_cov": dict(kl_coef=1.0),
    "reinforce": {},
    "sft": {},
}


class Plain:
    """A batch as Python floats. w is the log-ratio to mu, rho that of pi_old to mu."""

    def __init__(self, case: Ragged, options: dict):
        self.new, self.old = case.logprobs.tolist(), case.old_logprobs.tolist()
        self.adv, self.mask = case.advantages.tolist(), case.loss_mask.tolist()
        mu = case.rollout_logprobs.tolist()
        self.mu = [m if math.isfinite(m) else n for m, n in zip(mu, self.new)]
        self.r = [a - b for a, b in zip(self.new, self.old)]
        self.w = [a - b for a, b in zip(self.new, self.mu)]
        self.rho = [o - m if math.isfinite(m) else 0.0 for o, m in zip(self.old, mu)]
        self.ages = [int(case.version) - v for v in case.policy_versions.tolist()]
        self.keys, self.version = case.token_keys.tolist(), int(case.version)
        self.kept = [t for t, kept in enumerate(self.mask) if kept]
        self.rows = [[t for t in row if self.mask[t]] for row in case.rows()]
        self.o = options
        self.terms, self.grads = [0.0] * len(self.new), [0.0] * len(self.new)

    def set(self, t: int, term: float, grad: float) -> None:
        self.terms[t], self.grads[t] = term, grad

    def weigh(self, t: int, weight: float) -> None:
        """Put -weight A log pi."""
        self.set(t, -weight * self.adv[t] * self.new[t], -weight * self.adv[t])


def clip_term(
    r: float,
    a: float,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    ratio_cap: float = 0.0,
) -> tuple[float, float]:
    """Return (-S, d(-S) / d log r)."""
    capped = min(r, ratio_cap) if ratio_cap else r
    clipped = max(min(r, 1 + clip_high), 1 - clip_low)
    surrogate = min(capped * a, clipped * a)
    slope = r * a if surrogate == r * a else 0.0
    if dual_clip and a < 0 and surrogate < dual_clip * a:
        surrogate, slope = dual_clip * a, 0.0
    return -surrogate, -slope


def token_losses(p: Plain, name: str, t: int) -> None:
    o, a, r = p.o, p.adv[t], math.exp(p.r[t])
    if name == "ppo_clip":
        p.set(t, *clip_term(r, a, **o))
    elif name == "reinforce":
        p.weigh(t, 1.0)
    elif name == "sft":
        p.set(t, -p.new[t], -1.0)
    elif name == "sapo":
        tau = o["tau_pos"] if a > 0 else o["tau_neg"]
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        p.set(t, -4 / tau * s * a, -4 * s * (1 - s) * r * a)
    elif name == "cispo":
        p.weigh(t, max(min(r, o["ratio_high"]), o["ratio_low"]))
    elif name == "tis_pg":
        p.weigh(t, min(r, o["upper"]))
    elif name == "aipo":
        p.weigh(t, min(math.exp(p.w[t]), o["upper"]))


def off_policy_losses(p: Plain, name: str, t: int) -> None:
    o, a, w = p.o, p.adv[t], math.exp(p.w[t])
    if name.startswith("dppo"):
        pi, mu = math.exp(p.new[t]), math.exp(p.mu[t])
        if name == "dppo_tv":
            distance = abs(pi - mu)
        elif pi == mu:
            distance = 0.0
        else:
            distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        up = a > 0 and pi > mu and distance > o["threshold_high"]
        down = a < 0 and pi < mu and distance > o["threshold_low"]
        if not (up or down):
            p.set(t, -w * a, -w * a)
        return
    if name == "decoupled_ppo":
        prox, log_u = p.rho[t], p.r[t]
    else:
        age = max(p.ages[t], 0)
        prox = age / (age + 1) * p.w[t]
        log_u = p.w[t] - prox
    if o["weight_cap"] and math.exp(prox) > o["weight_cap"]:
        return
    term, slope = clip_term(math.exp(log_u), a, clip_low=o["clip_low"], clip_high=o["clip_high"])
    p.set(t, math.exp(prox) * term, math.exp(prox) * slope)


def sequence_losses(p: Plain, name: str, row: list[int]) -> None:
    o, n = p.o, len(row)
    mean = sum(p.r[t] for t in row) / n
    if name in ("gspo", "luspo", "gspo_token"):
        for t in row:
            p.terms[t], slope = clip_term(math.exp(mean), p.adv[t], **o)
            if name == "gspo_token":
                p.grads[t] = slope
                continue
            for u in row:
                p.grads[u] += slope / n
    elif name == "gmpo":
        bounds = {
            t: (
                -math.inf if p.adv[t] >= 0 else -o["clip_low"],
                math.inf if p.adv[t] <= 0 else o["clip_high"],
            )
            for t in row
        }
        clipped = {t: max(min(p.r[t], bounds[t][1]), bounds[t][0]) for t in row}
        ratio = math.exp(sum(clipped.values()) / n)
        for t in row:
            p.terms[t] = -ratio * p.adv[t]
            for u in row:
                p.grads[u] -= ratio * p.adv[t] / n if clipped[u] == p.r[u] else 0.0
    elif name == "vespo":
        total = sum(p.w[t] for t in row)
        for t in row:
            side = "neg" if p.adv[t] < 0 else "pos"
            k, rate = o[f"k_{side}"], o[f"lambda_{side}"]
            p.weigh(t, math.exp(rate + k * total - rate * math.exp(total)))
    elif name == "topr":
        total = sum(p.w[t] for t in row)
        for t in row:
            log_w = total if o["level"] == "sequence" else p.w[t]
            p.weigh(t, 1.0 if p.adv[t] > 0 else min(math.exp(log_w), o["upper"]))
    else:
        logs, strength = (p.r, o["tau"]) if name == "kimi" else (p.w, o["beta"])
        total = sum(logs[t] for t in row)
        for t in row:
            pull = total if o["level"] == "sequence" else logs[t]
            p.set(
                t, -p.adv[t] * p.new[t] + strength / 2 * logs[t] * pull, -p.adv[t] + strength * pull
            )


def batch_losses(p: Plain, name: str) -> None:
    o, count = p.o, len(p.kept)
    if name == "m2po":
        squares = sorted(p.rho[t] ** 2 for t in p.kept)
        while squares and sum(squares) / len(squares) > o["threshold"]:
            squares.pop()
        for t in p.kept:
            if squares and p.rho[t] ** 2 <= squares[-1]:
                p.set(t, -math.exp(p.w[t]) * p.adv[t], -math.exp(p.w[t]) * p.adv[t])
        return
    mean_a = sum(p.adv[t] for t in p.kept) / count
    mean_l = sum(p.old[t] for t in p.kept) / count
    start = {t: (p.adv[t] - mean_a) * (p.old[t] - mean_l) for t in p.kept}
    now = {t: (p.adv[t] - mean_a) * (p.new[t] - mean_l) for t in p.kept}
    largest = sorted(start.values(), reverse=True)
    in_band = [t for t in p.kept if o.get("cov_low", 0) < start[t] < o.get("cov_high", 0)]
    for t in p.kept:
        r, a = math.exp(p.r[t]), p.adv[t]
        if name == "kl_cov":
            held = now[t] > largest[max(1, int(o["select_frac"] * count))] + 1e-12
            sign = (p.r[t] > 0) - (p.r[t] < 0)
            p.set(
                t, -r * a + held * o["kl_coef"] * abs(p.r[t]), -r * a + held * o["kl_coef"] * sign
            )
            continue
        term, slope = clip_term(r, a, clip_low=o["clip_low"], clip_high=o["clip_high"])
        chance = max(o["select_frac"] * count, 1) / max(len(in_band), 1)
        is_candidate = o["cov_low"] < now[t] < o["cov_high"] and slope == -r * a
        if not (is_candidate and lot(p.keys[t], p.version) < chance):
            p.set(t, term, slope)


def lot(key: int, version: int) -> float:
    return (mix((mix(version) + key) % 2**64) >> 11) / 2**53


def mix(z: int) -> int:
    """Return splitmix64's next output."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def reference(name: str, case: Ragged, options: dict) -> tuple[list[float], list[float]]:
    """Return terms, and the gradient of their sum with respect to each logprob."""
    p = Plain(case, DEFAULTS[name] | options)
    if name in ("m2po", "clip_cov", "kl_cov"):
        batch_losses(p, name)
    for row in p.rows:
        if row and name in ("gspo", "gspo_token", "luspo", "gmpo", "vespo", "topr", "kimi", "dro"):
            sequence_losses(p, name, row)
        for t in row:
            if name in ("dppo_tv", "dppo_kl", "decoupled_ppo", "a3po"):
                off_policy_losses(p, name, t)
            else:
                token_losses(p, name, t)
    return p.terms, p.grads


def drawn(seed: int) -> Ragged:
    """Draw a batch of probabilities.

    In every other one some of the engine's are not finite, and in every third the advantages
    differ within a sequence and some are 0.
    """
    case = ragged(seed)
    if seed % 3 == 0:
        g = torch.Generator().manual_seed(seed)
        case.advantages = torch.randn(len(case.advantages), generator=g, dtype=torch.float64)
        case.advantages[::3] = 0.0
    with torch.no_grad():
        for logprobs in (case.logprobs, case.old_logprobs, case.rollout_logprobs):
            logprobs.clamp_(max=-1e-3)
    if seed % 2:
        case.rollout_logprobs[seed % 5 :: 7] = math.nan
        case.rollout_logprobs[seed % 3 :: 11] = -math.inf
    return case


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name, options", CASES)
def test_loss_and_gradient_equal_a_plain_loop(name, options, seed):
    case = drawn(seed)
    for batch, tolerance in ((case, 1e-10), (case.single(), 1e-5)):
        terms, _ = call(name, batch, **options)
        assert terms.dtype == batch.logprobs.dtype
        expected = reference(name, batch, options)
        assert_loop(terms, [batch.logprobs], expected, tolerance=tolerance)


def test_every_loss_has_tokens_on_both_sides_of_its_bounds():
    # Otherwise the comparisons above would not see a bound.
    for name, options in CASES:
        totals: dict[str, float] = {}
        for seed in range(6):
            for key, (numerator, _denominator) in call(name, drawn(seed), **options)[1].items():
                totals[key] = totals.get(key, 0.0) + float(numerator)
        if name in ("dppo_tv", "dppo_kl", "m2po", "clip_cov") or (
            name in ("decoupled_ppo", "a3po") and options
        ):
            assert totals["policy/dropped_frac"] > 0, (name, options)
        elif name == "kl_cov":
            assert totals["policy/kl_cov_frac"] > 0
        elif "policy/clip_frac" in totals and (name, options) != ("cispo", {}):
            assert totals["policy/clip_frac"] > 0, (name, options)
