"""Each loss against a plain loop from its paper: value, gradient, masks, stats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged, ragged

from spmdrl.algorithms import registry
from spmdrl.algorithms.losses import cispo, gspo, ppo_clip, reinforce, sft

NAMES = registry.names("loss")
OPTIONS = {
    "ppo_clip": [{}, dict(clip_low=0.1, clip_high=0.28), dict(dual_clip=1.5),
                 dict(ratio_cap=1.6), dict(clip_low=0.2, dual_clip=3.0, ratio_cap=4.0)],
    "cispo": [{}, dict(ratio_low=0.8, ratio_high=1.2)],
    "gspo": [{}, dict(clip_low=0.1, clip_high=0.1)],
    "reinforce": [{}], "sft": [{}],
}
CASES = [(name, options) for name in NAMES for options in OPTIONS[name]]


def call(name: str, case: Ragged, **options: float) -> tuple[torch.Tensor, dict]:
    return registry.call(registry.get("loss", name), case.inputs(), options)


# ---------------------------------------------------------------- references
# One Python float at a time: value and derivative by the logprob, from the papers.


def clip_term(r: float, a: float, *, clip_low: float, clip_high: float, dual_clip: float = 0.0,
              ratio_cap: float = 0.0) -> tuple[float, float]:
    """Return (-S, d(-S) / d log r)."""
    capped = min(r, ratio_cap) if ratio_cap else r
    clipped = max(min(r, 1 + clip_high), 1 - clip_low)
    surrogate = min(capped * a, clipped * a)
    slope = r * a if surrogate == r * a else 0.0
    if dual_clip and a < 0 and surrogate < dual_clip * a:
        surrogate, slope = dual_clip * a, 0.0
    return -surrogate, -slope


def reference(name: str, case: Ragged, options: dict) -> tuple[list[float], list[float]]:
    """Return terms, and the gradient of their sum with respect to each logprob."""
    new, old = case.logprobs.tolist(), case.old_logprobs.tolist()
    adv, mask = case.advantages.tolist(), case.loss_mask.tolist()
    terms, grads = [0.0] * len(new), [0.0] * len(new)
    for row in case.rows():
        kept = [t for t in row if mask[t]]
        if name == "gspo" and kept:
            s = math.exp(sum(new[t] - old[t] for t in kept) / len(kept))
            bounds = dict(clip_low=3e-4, clip_high=4e-4) | options
            for t in kept:
                terms[t], slope = clip_term(s, adv[t], **bounds)
                for u in kept:
                    grads[u] += slope / len(kept)
            continue
        for t in kept:
            r = math.exp(new[t] - old[t])
            if name == "ppo_clip":
                terms[t], grads[t] = clip_term(
                    r, adv[t], **dict(clip_low=0.2, clip_high=0.2) | options)
            elif name == "reinforce":
                terms[t], grads[t] = -adv[t] * new[t], -adv[t]
            elif name == "cispo":
                bounds = dict(ratio_low=0.0, ratio_high=5.0) | options
                w = max(min(r, bounds["ratio_high"]), bounds["ratio_low"])
                terms[t], grads[t] = -w * adv[t] * new[t], -w * adv[t]
            elif name == "sft":
                terms[t], grads[t] = -new[t], -1.0
    return terms, grads


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name, options", CASES)
def test_loss_and_gradient_equal_a_plain_loop(name: str, options: dict, seed: int) -> None:
    case = ragged(seed)
    terms, _ = call(name, case, **options)
    (gradient,) = torch.autograd.grad(terms.sum(), case.logprobs)
    expected_terms, expected_gradient = reference(name, case, options)
    assert (terms - torch.tensor(expected_terms, dtype=torch.float64)).abs().max() < 1e-10
    assert (gradient - torch.tensor(expected_gradient, dtype=torch.float64)).abs().max() < 1e-10


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name, options", CASES)
@given(seed=st.integers(0, 10_000), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@settings(max_examples=20, deadline=None)
def test_masked_tokens_have_zero_term_and_gradient_whatever_they_hold(
    name, options, seed, garbage
) -> None:
    clean, dirty = ragged(seed), ragged(seed)
    with torch.no_grad():
        for tensor in (dirty.logprobs, dirty.old_logprobs, dirty.advantages):
            tensor[~dirty.loss_mask] = garbage
    terms, stats = call(name, dirty, **options)
    (gradient,) = torch.autograd.grad(terms.sum(), dirty.logprobs)
    assert (terms[~dirty.loss_mask] == 0).all() and (gradient[~dirty.loss_mask] == 0).all()
    clean_terms, clean_stats = call(name, clean, **options)
    (clean_gradient,) = torch.autograd.grad(clean_terms.sum(), clean.logprobs)
    assert torch.equal(terms, clean_terms) and torch.equal(gradient, clean_gradient)
    assert all(torch.equal(stats[k][0], clean_stats[k][0]) for k in stats)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "reinforce"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_at_ratio_one_every_loss_has_the_plain_policy_gradient(name, seed) -> None:
    case = ragged(seed, drift=0.0)
    terms, stats = call(name, case)
    (gradient,) = torch.autograd.grad(terms.sum(), case.logprobs)
    assert torch.equal(gradient, -case.advantages * case.loss_mask)
    assert stats["policy/ratio"][0] == case.loss_mask.sum()
    assert "policy/clip_frac" not in stats or stats["policy/clip_frac"][0] == 0


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_at_ratio_one_gspo_has_the_mean_policy_gradient(seed) -> None:
    case = ragged(seed, drift=0.0)
    terms, _ = call("gspo", case)
    (gradient,) = torch.autograd.grad(terms.sum(), case.logprobs)
    assert torch.allclose(gradient, -case.advantages * case.loss_mask, atol=1e-12)


@pytest.mark.parametrize("name, options", CASES)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 7))
@settings(max_examples=15, deadline=None)
def test_splitting_and_reordering_micro_batches_changes_no_term(name, options, seed, cut) -> None:
    case = ragged(seed)
    whole, whole_stats = call(name, case, **options)
    parts, totals = {}, {}
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
    for members in (order[:cut], order[cut:]):
        piece = select(case, members)
        terms, stats = call(name, piece, **options)
        cu = piece.cu_seqlens.tolist()
        parts |= {s: terms[a:b] for s, a, b in zip(members, cu, cu[1:])}
        for key, (numerator, denominator) in stats.items():
            n, d = totals.get(key, (0.0, 0.0))
            totals[key] = (n + numerator, d + denominator)
    assert torch.allclose(torch.cat([parts[s] for s in range(8)]), whole, atol=1e-12)
    for key, pair in whole_stats.items():
        assert torch.allclose(torch.stack(totals[key]), torch.stack(pair), atol=1e-10)


def select(case: Ragged, members: list[int]) -> Ragged:
    rows = case.rows()
    order = torch.tensor([t for s in members for t in rows[s]], dtype=torch.int64)
    lengths = torch.tensor([0] + [len(rows[s]) for s in members])
    flat = {k: v.detach()[order] for k, v in vars(case).items() if k != "cu_seqlens"}
    flat["logprobs"].requires_grad_()
    return Ragged(**flat, cu_seqlens=lengths.cumsum(0).int())


# ---------------------------------------------------------------- known values


def one_token_each(ratios: list[float], advantages: list[float]) -> Ragged:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log() - 1
    count = len(ratios)
    return Ragged(
        logprobs=logprobs.requires_grad_(), old_logprobs=torch.full_like(logprobs, -1),
        rollout_logprobs=torch.full_like(logprobs, -1),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(count, dtype=torch.bool),
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
    )


def test_clip_table() -> None:
    terms, stats = call("ppo_clip", one_token_each([0.5, 1.0, 1.5], [1.0, -1.0, 2.0]))
    assert terms.tolist() == pytest.approx([-0.5, 1.0, -2.4])
    assert float(stats["policy/clip_frac"][0]) == 1 and float(stats["policy/clip_frac"][1]) == 3
    assert float(stats["policy/clip_high_frac"][0]) == 1


def test_low_and_high_bounds_are_separate() -> None:
    case = one_token_each([0.7, 1.25, 1.25, 0.7], [-1.0, 1.0, -1.0, 1.0])
    terms, stats = call("ppo_clip", case, clip_low=0.1, clip_high=0.28)
    assert terms.tolist() == pytest.approx([0.9, -1.25, 1.25, -0.7])
    assert [float(stats[f"policy/clip_{side}_frac"][0]) for side in ("low", "high")] == [1, 0]


def test_dual_clip_and_ratio_cap_bound_negative_advantages() -> None:
    case = one_token_each([10.0, 10.0], [-1.0, 1.0])
    for options, bound in ((dict(dual_clip=3.0), 3.0), (dict(ratio_cap=4.0), 4.0)):
        terms, stats = call("ppo_clip", case, **options)
        (gradient,) = torch.autograd.grad(terms.sum(), case.logprobs)
        assert terms.tolist() == pytest.approx([bound, -1.2]) and gradient.tolist() == [0, 0]
        assert float(stats["policy/dual_clip_frac"][0]) == 1
        assert float(stats["policy/clip_frac"][0]) == 2


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    case = one_token_each([10.0], [2.0])
    terms, stats = call("cispo", case)
    (gradient,) = torch.autograd.grad(terms.sum(), case.logprobs)
    assert gradient.tolist() == pytest.approx([-10.0])  # 5 * 2
    assert float(stats["policy/clip_high_frac"][0]) == 1


def test_log_ratios_beyond_twenty_stay_finite() -> None:
    case = one_token_each([1.0, 1.0], [1.0, -1.0])
    with torch.no_grad():
        case.logprobs += 500.0
    for name in NAMES:
        terms, _ = call(name, case)
        (gradient,) = torch.autograd.grad(terms.sum(), case.logprobs)
        assert terms.isfinite().all() and gradient.isfinite().all(), name


def test_a_logprob_that_is_not_finite_is_not_hidden_inside_the_mask() -> None:
    case = one_token_each([1.0, 1.0], [1.0, 1.0])
    with torch.no_grad():
        case.logprobs[0] = math.nan
    for name in NAMES:
        assert call(name, case)[0][0].isnan(), name


@pytest.mark.parametrize("name", NAMES)
def test_stats_are_detached_and_named_policy(name: str) -> None:
    _, stats = call(name, ragged(3))
    for key, (numerator, denominator) in stats.items():
        assert key.startswith("policy/")
        for value in (numerator, denominator):
            assert value.shape == () and value.dtype == torch.float64 and not value.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_float32(name: str) -> None:
    case = ragged(1)
    case = Ragged(**{k: v.detach().float() if v.is_floating_point() else v
                     for k, v in vars(case).items()})
    assert call(name, case)[0].dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_a_dummy_micro_batch_gives_zero(name: str) -> None:
    case = Ragged(**{k: torch.zeros(1, dtype=torch.float64, requires_grad=k == "logprobs")
                     for k in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")},
                  loss_mask=torch.zeros(1, dtype=torch.bool),
                  cu_seqlens=torch.tensor([0, 1], dtype=torch.int32))
    terms, stats = call(name, case)
    terms.sum().backward()
    assert terms.tolist() == [0] and case.logprobs.grad.tolist() == [0]
    assert all(float(n) == float(d) == 0 for n, d in stats.values())


def raises(message: str, function: Callable, **options: float) -> None:
    inputs = ragged(0).inputs()
    with pytest.raises(ValueError, match=message):
        registry.call(function, inputs, options)


def test_bounds_out_of_range_are_refused() -> None:
    raises("clip_low, clip_high", ppo_clip, clip_low=1.5)
    raises("dual_clip: must be above 1", ppo_clip, dual_clip=0.5)
    raises("ratio_cap: must be above 1 . clip_high = 1.2", ppo_clip, ratio_cap=1.1)
    raises("ratio_low, ratio_high", cispo, ratio_high=0.2)
    raises("clip_low, clip_high", gspo, clip_high=-1.0)


def test_reinforce_and_sft_are_one_formula_at_advantage_one() -> None:
    case = ragged(5)
    inputs = case.inputs()
    del inputs["cu_seqlens"], inputs["rollout_logprobs"]
    inputs["advantages"] = torch.ones_like(case.advantages)
    one, _ = reinforce(**inputs)
    other, stats = sft(case.logprobs, loss_mask=case.loss_mask)
    assert torch.equal(one, other)
    assert torch.isclose(stats["policy/nll"][0], other.sum())
