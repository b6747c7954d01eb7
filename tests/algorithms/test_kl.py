"""KL estimates against plain loops, and their expected gradients against the exact KL's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import kl
from tests.helpers.built import examples
from tests.helpers.ragged import Ragged, assert_loop, assert_nothing_is_read, ragged

NAMES = tuple(kl.__all__)
CASES = [(name, unbiased) for name in NAMES for unbiased in (False, True)]


def call(name: str, case: Ragged, *, unbiased: bool) -> torch.Tensor:
    # The engine's logprobs stand for the reference's: a third policy near the other two.
    return getattr(kl, name)(
        case.logprobs,
        case.rollout_logprobs,
        loss_mask=case.loss_mask,
        old_logprobs=case.old_logprobs,
        unbiased=unbiased,
    )


def reference(name: str, case: Ragged, *, unbiased: bool) -> tuple[list[float], list[float]]:
    """Return terms and the gradient of their sum, one Python float at a time."""
    terms, grads = [], []
    for new, ref, old, kept in zip(
        case.logprobs.tolist(),
        case.rollout_logprobs.tolist(),
        case.old_logprobs.tolist(),
        case.loss_mask.tolist(),
    ):
        d, r = new - ref, math.exp(new - old) if unbiased else 1.0
        value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[name]
        slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[name]
        if unbiased and name != "k2":
            slope += value  # the ratio is live
        terms.append(r * value if kept else 0.0)
        grads.append(r * slope if kept else 0.0)
    return terms, grads


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name, unbiased", CASES)
def test_terms_and_gradients_equal_a_plain_loop(name, unbiased, seed):
    for case, tolerance in ((ragged(seed), 1e-10), (ragged(seed).single(), 1e-5)):
        terms = call(name, case, unbiased=unbiased)
        assert terms.dtype == case.logprobs.dtype
        expected = reference(name, case, unbiased=unbiased)
        assert_loop(terms, [case.logprobs], expected, tolerance=tolerance)


@pytest.mark.parametrize("name, unbiased", CASES)
@examples(
    15, seed=st.integers(0, 10_000), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
def test_masked_tokens_have_zero_term_and_gradient_whatever_they_hold(
    name, unbiased, seed, garbage
):
    clean, dirty = ragged(seed), ragged(seed).dirty(garbage)

    def both(case: Ragged) -> tuple[torch.Tensor, dict]:
        stats = kl.kl_stats(case.logprobs, case.rollout_logprobs, loss_mask=case.loss_mask)
        return call(name, case, unbiased=unbiased), stats

    off = ~clean.loss_mask
    assert_nothing_is_read(both, (dirty, clean), lambda case: [case.logprobs], off=off)


@pytest.mark.parametrize("name, unbiased", CASES)
@examples(15, seed=st.integers(0, 10_000))
def test_permuting_and_splitting_tokens_changes_no_term(name, unbiased, seed):
    case = ragged(seed)
    whole = call(name, case, unbiased=unbiased)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    pieces = []
    for members in order.tensor_split(3):
        flat = {k: v[members] for k, v in vars(case).items() if k != "cu_seqlens"}
        pieces.append(call(name, Ragged(**flat, cu_seqlens=case.cu_seqlens), unbiased=unbiased))
    assert torch.equal(torch.cat(pieces), whole[order])


# ---------------------------------------------------------------- expectations, exactly
# One token over a vocabulary of 7: the expectation is a sum.


def expected(name: str, *, unbiased: bool, stale: bool) -> dict[str, torch.Tensor]:
    """Return an estimate's expected value and gradient, and both KLs' with theirs."""
    g = torch.Generator().manual_seed(5)
    logits, ref, old = torch.randn(3, 7, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, ref = logits.log_softmax(0), ref.log_softmax(0)
    old = old.log_softmax(0) if stale else logprobs.detach()
    terms = getattr(kl, name)(
        logprobs,
        ref,
        old_logprobs=old,
        unbiased=unbiased,
        loss_mask=torch.ones(7, dtype=torch.bool),
    )
    found = {
        "value": (old.exp() * terms).sum(),
        "kl": (logprobs.exp() * (logprobs - ref)).sum(),
        "other_kl": (ref.exp() * (ref - logprobs)).sum(),
    }
    return found | {
        f"{k}_gradient": torch.autograd.grad(v, logits, retain_graph=True)[0]
        for k, v in found.items()
    }


def test_k1_as_a_loss_has_no_gradient_in_expectation():
    found = expected("k1", unbiased=False, stale=False)
    assert torch.isclose(found["value"], found["kl"])
    assert found["value_gradient"].abs().max() < 1e-12


def test_k2_as_a_loss_has_the_gradient_of_the_kl_but_not_its_value():
    found = expected("k2", unbiased=False, stale=False)
    assert torch.allclose(found["value_gradient"], found["kl_gradient"])
    assert not torch.isclose(found["value"], found["kl"], rtol=1e-2)


def test_k3_as_a_loss_has_the_gradient_of_the_other_direction():
    found = expected("k3", unbiased=False, stale=False)
    assert torch.isclose(found["value"], found["kl"])
    assert torch.allclose(found["value_gradient"], found["other_kl_gradient"])
    assert not torch.allclose(found["value_gradient"], found["kl_gradient"], rtol=1e-2)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_unbiased_has_the_gradient_of_the_kl_for_tokens_of_the_old_policy(name, stale):
    found = expected(name, unbiased=True, stale=stale)
    assert torch.allclose(found["value_gradient"], found["kl_gradient"], atol=1e-12)
    assert torch.isclose(found["value"], found["kl"]) == (name != "k2")


def test_unbiased_k2_and_k3_have_one_gradient_per_token():
    case = ragged(3)
    one, other = (
        torch.autograd.grad(call(k, case, unbiased=True).sum(), case.logprobs)[0]
        for k in ("k2", "k3")
    )
    assert torch.allclose(one, other, atol=1e-12)


# ---------------------------------------------------------------- known values


@pytest.mark.parametrize("name, unbiased", CASES)
def test_policy_equal_to_reference_gives_zero(name, unbiased):
    case = ragged(2, drift=0.0)
    assert (call(name, case, unbiased=unbiased) == 0).all()


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("gap", [1e-4, -1e-4, 3e-3, 0.0])
def test_k3_keeps_its_sign_and_digits_near_zero_in_float32(unbiased, gap):
    new, ref = torch.tensor([gap]), torch.zeros(1)
    term = kl.k3(new, ref, old_logprobs=new, loss_mask=torch.tensor([True]), unbiased=unbiased)
    exact = math.expm1(-gap) + gap
    assert float(term) >= 0 and float(term) == pytest.approx(exact, abs=2e-3 * abs(gap) ** 1.5)


@pytest.mark.parametrize("name, unbiased", CASES)
def test_log_ratios_beyond_twenty_stay_finite(name, unbiased):
    for shift in (500.0, -500.0, math.inf):
        case = ragged(1)
        with torch.no_grad():
            case.rollout_logprobs += shift
            case.old_logprobs -= shift
        terms = call(name, case, unbiased=unbiased)
        (gradient,) = torch.autograd.grad(terms.sum(), case.logprobs)
        assert terms.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("gap", [-100.0, -30.0, -21.0, -19.0, 19.0, 21.0, 30.0, 100.0])
@pytest.mark.parametrize("name, unbiased", CASES)
def test_far_tokens_are_pulled_as_the_formula_says(name, unbiased, gap):
    """d = gap, r = e^0.5."""
    new = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    case = dict(old_logprobs=new.detach() - 0.5, loss_mask=torch.tensor([True]))
    term = getattr(kl, name)(new, torch.zeros_like(new), unbiased=unbiased, **case)
    (slope,) = torch.autograd.grad(term.sum(), new)
    r, above = math.exp(0.5), math.expm1(min(-gap, 20.0))
    value = {"k1": gap, "k2": gap**2 / 2, "k3": above + gap}[name]
    own = {"k1": 1.0, "k2": gap, "k3": -above}[name]
    weighed = {"k1": r * (gap + 1), "k2": r * gap, "k3": r * gap}[name]
    assert float(term.detach()) == pytest.approx(r * value if unbiased else value, rel=1e-12)
    assert float(slope) == pytest.approx(weighed if unbiased else own, rel=1e-12)


def test_a_logprob_that_is_not_a_number_is_not_hidden_inside_the_mask():
    case = ragged(1)
    case.rollout_logprobs[4] = math.nan
    assert all(call(name, case, unbiased=False)[4].isnan() for name in NAMES)


def test_the_reference_and_the_old_policy_get_no_gradient():
    for name, unbiased in CASES:
        case = ragged(1)
        case.rollout_logprobs.requires_grad_()
        case.old_logprobs.requires_grad_()
        call(name, case, unbiased=unbiased).sum().backward()
        assert case.rollout_logprobs.grad is None and case.old_logprobs.grad is None


def test_stats_are_sums_over_loss_tokens_and_detached():
    case = ragged(4)
    stats = kl.kl_stats(case.logprobs, case.rollout_logprobs, loss_mask=case.loss_mask)
    assert list(stats) == ["policy/kl_ref", "policy/kl_ref_k3"]
    for name, (numerator, denominator) in zip(("k1", "k3"), stats.values()):
        assert math.isclose(numerator, sum(reference(name, case, unbiased=False)[0]))
        assert denominator == case.loss_mask.sum()
        assert numerator.dtype == denominator.dtype == torch.float64
        assert numerator.shape == () and not numerator.requires_grad


def test_nothing_in_the_loss_gives_zero_over_zero():
    case = ragged(4)
    case.loss_mask[:] = False
    stats = kl.kl_stats(case.logprobs, case.rollout_logprobs, loss_mask=case.loss_mask)
    assert all(float(n) == float(d) == 0 for n, d in stats.values())
