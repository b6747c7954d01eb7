"""Entropy tools: the mask of high-entropy tokens and the controller of the bonus."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import registry
from spmdrl.algorithms.entropy import adaptive_entropy_coef, top_entropy
from tests.helpers.built import examples

FINITE = st.floats(0, 3).map(lambda x: round(x, 1))  # rounded: ties are common


def weights(entropy: list[float], **options: float) -> list[float]:
    column = torch.tensor(entropy, dtype=torch.float64)
    cut = top_entropy.statistics(column, **options)
    return top_entropy(
        column, loss_mask=torch.ones(len(column), dtype=torch.bool), **cut, **options
    )[0].tolist()


@examples(60, entropy=st.lists(FINITE, min_size=1, max_size=40), frac=st.floats(0.01, 1.0))
def test_the_top_share_stays_with_its_equals(entropy, frac):
    found = weights(entropy, keep_frac=frac)
    wanted = max(1, math.ceil(frac * len(entropy) - 1e-9))
    edge = sorted(entropy, reverse=True)[wanted - 1]
    assert found == [float(h >= edge) for h in entropy]
    assert sum(found) >= wanted


@examples(30, entropy=st.lists(FINITE, max_size=40), seed=st.integers(0, 100))
def test_the_cut_does_not_depend_on_the_order(entropy, seed):
    column = torch.tensor(entropy, dtype=torch.float64)
    order = torch.randperm(len(column), generator=torch.Generator().manual_seed(seed))
    one, two = top_entropy.statistics(column), top_entropy.statistics(column[order])
    assert torch.equal(one["entropy_cut"], two["entropy_cut"])
    assert one["entropy_cut"].dtype == torch.float64 and one["entropy_cut"].shape == ()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_tokens_have_weight_zero_and_enter_no_count(garbage):
    entropy = torch.tensor([0.1, garbage, 2.0, 1.0], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    cut = top_entropy.statistics(entropy[mask], keep_frac=0.5)
    found, stats = top_entropy(entropy, loss_mask=mask, **cut, keep_frac=0.5)
    assert found.tolist() == [0, 0, 1, 1] and found.dtype == torch.float32
    assert not found.requires_grad
    numerator, denominator = stats["policy/low_entropy_frac"]
    assert (float(numerator), float(denominator)) == (1, 3) and numerator.dtype == torch.float64


def test_an_entropy_that_is_not_a_number_is_not_dropped():
    entropy = torch.tensor([math.nan, 0.5])
    found, _ = top_entropy(
        entropy,
        loss_mask=torch.ones(2, dtype=torch.bool),
        entropy_cut=torch.tensor(1.0, dtype=torch.float64),
    )
    assert found.tolist() == [1, 0]  # the update must see it


def test_shares_that_round_badly_keep_what_they_say():
    for percent in range(1, 101):  # 0.07 * 100 is 7.000000000000001
        assert sum(weights([float(i) for i in range(100)], keep_frac=percent / 100)) == percent


def test_scalars_and_options_fit_the_mask():
    assert set(top_entropy.statistics(torch.ones(3))) <= set(registry.inputs_of(top_entropy))
    assert registry.options_of(top_entropy.statistics) == registry.options_of(top_entropy)
    for frac in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="keep_frac"):
            top_entropy.statistics(torch.ones(3), keep_frac=frac)


def test_the_coefficient_steps_towards_the_target_and_rests_above_it():
    coef, applied, path = 0.0, 0.0, []
    for entropy in (0.1, 0.1, 0.3, 0.2, 0.1):
        coef, applied = adaptive_entropy_coef(coef, entropy=entropy, target=0.2, delta=0.01)
        path.append((round(coef, 9), round(applied, 9)))
    assert path == [(0.01, 0.01), (0.02, 0.02), (0.01, 0.0), (0.01, 0.01), (0.02, 0.02)]


@examples(
    60,
    coef=st.floats(0, 0.05),
    entropy=st.floats(0, 1),
    lower=st.floats(0, 0.01),
    upper=st.floats(0.02, 0.1),
)
def test_the_coefficient_stays_in_bounds_and_moves_one_step(coef, entropy, lower, upper):
    coef = min(max(coef, lower), upper)
    found, applied = adaptive_entropy_coef(
        coef, entropy=entropy, target=0.5, delta=5e-3, lower=lower, upper=upper
    )
    assert lower <= found <= upper and abs(found - coef) <= 5e-3 + 1e-15
    assert (found - coef) * (0.5 - entropy) >= 0
    assert applied == (found if entropy <= 0.5 else 0.0)


def test_an_entropy_that_is_not_finite_moves_nothing():
    assert adaptive_entropy_coef(0.03, entropy=math.nan, target=0.2, delta=0.01) == (0.03, 0.0)


@pytest.mark.parametrize(
    "option, value",
    [("target", math.nan), ("delta", 0.0), ("lower", -1.0), ("lower", 2.0), ("upper", math.nan)],
)
def test_options_out_of_range_are_named(option, value):
    options = dict(entropy=0.1, target=0.2, delta=0.01) | {option: value}
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        adaptive_entropy_coef(0.0, **options)
