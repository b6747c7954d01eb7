"""Shaping against plain loops and brute force, with its bounds."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms.groups import group_rewards
from spmdrl.algorithms.shaping import (
    adaptive_kl_coef,
    best_at_k_estimate,
    pass_at_k_estimate,
    penalize_overlong,
    scale_and_clamp,
    stop_properly,
)
from tests.helpers.built import examples
from tests.helpers.ragged import scalars


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_reward_shaping_equals_plain_loops(seed, dtype, tolerance):
    batch = scalars(seed)
    rewards = (batch.rewards - 0.4).to(dtype)
    lengths, cut = batch.response_lengths.tolist(), batch.is_truncated.tolist()

    def soft(length: int) -> float:
        if length <= 15 - 6:
            return 0.0
        return ((15 - 6) - length) / 6 if length <= 15 else -1.0

    results = {
        "overlong": penalize_overlong(
            rewards, batch.response_lengths, max_response_tokens=15, buffer_tokens=6, penalty=0.5
        ),
        "stop": stop_properly(rewards, batch.is_truncated, factor=0.25, penalty=0.1),
        "scale": scale_and_clamp(rewards, shift=-0.1, scale=3.0, low=-0.5, high=1.0),
    }
    for i, reward in enumerate((batch.rewards - 0.4).tolist()):
        lowered = (0.25 * reward if reward > 0 else reward) - 0.1
        expected = {
            "overlong": reward + 0.5 * soft(lengths[i]),
            "stop": lowered if cut[i] else reward,
            "scale": min(max(3.0 * (reward - 0.1), -0.5), 1.0),
        }
        for name, value in expected.items():
            assert results[name][i].item() == pytest.approx(value, abs=tolerance)
    assert all(r.dtype == torch.float64 for r in results.values())


def test_the_overlong_penalty_at_its_corners():
    got = penalize_overlong(
        torch.zeros(5), torch.tensor([0, 8, 10, 12, 99]), max_response_tokens=12, buffer_tokens=4
    )
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


@examples(
    40,
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    limit=st.integers(1, 40),
    part=st.floats(0, 1),
    penalty=st.floats(0, 5),
)
def test_the_overlong_penalty_is_bounded_and_falls_with_length(lengths, limit, part, penalty):
    got = penalize_overlong(
        torch.zeros(len(lengths)),
        torch.tensor(sorted(lengths)),
        max_response_tokens=limit,
        buffer_tokens=max(1, int(part * limit)),
        penalty=penalty,
    )
    assert ((got <= 0) & (got >= -penalty)).all() and (got.diff() <= 0).all()


@examples(
    40,
    rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    factor=st.floats(0, 1),
    penalty=st.floats(0, 2),
)
def test_a_truncated_response_never_gains(rewards, factor, penalty):
    before = torch.tensor(rewards, dtype=torch.float64)
    cut = torch.arange(len(rewards)) % 2 == 0
    after = stop_properly(before, cut, factor=factor, penalty=penalty)
    assert (after <= before).all() and torch.equal(after[~cut], before[~cut])


def test_a_factor_does_not_reward_truncation_of_a_bad_answer():
    got = stop_properly(torch.tensor([-1.0, 1.0]), torch.tensor([True, True]), factor=0.0)
    assert got.tolist() == [-1.0, 0.0]


def test_rewards_that_are_not_finite_stay_visible():
    bad = torch.tensor([math.nan, math.inf, -math.inf])
    yes = torch.ones(3, dtype=torch.bool)
    for got in (
        penalize_overlong(bad, torch.ones(3), max_response_tokens=2, buffer_tokens=1),
        stop_properly(bad, yes, penalty=1.0),
        scale_and_clamp(bad, low=-1.0, high=1.0),
    ):
        assert not got.isfinite().any()


@pytest.mark.parametrize("seed", range(6))
def test_a_group_has_signal_when_two_valid_rewards_differ(seed):
    batch = scalars(seed)
    groups = group_rewards(batch.rewards, batch.group_ids, is_valid=batch.is_valid)
    rewards, valid = batch.rewards.tolist(), batch.is_valid.tolist()
    ids = batch.group_ids.tolist()
    expected = [
        len({rewards[i] for i in range(len(ids)) if ids[i] == g and valid[i]}) > 1
        for g in sorted(set(ids))
    ]
    assert groups.has_spread.tolist() == expected
    shifted = group_rewards(batch.rewards + 7.0, batch.group_ids, is_valid=batch.is_valid)
    assert shifted.has_spread.tolist() == expected


def test_rewards_that_differ_by_rounding_carry_no_signal():
    groups = group_rewards(
        torch.tensor([0.3, 0.1 + 0.2]).double(),
        torch.zeros(2).long(),
        is_valid=torch.ones(2, dtype=torch.bool),
    )
    assert groups.has_spread.tolist() == [False]


# ---------------------------------------------------------------- pass at k


def test_best_of_four_with_two_of_four_right_is_exactly_one():
    assert pass_at_k_estimate(4, 2, 4) == 1.0  # not .926, a bootstrap with replacement
    assert best_at_k_estimate([1.0, 0.0, 0.0, 1.0], 4) == 1.0


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_equals_the_mean_over_all_subsets(num_samples):
    for correct in range(num_samples + 1):
        right = [1.0] * correct + [0.0] * (num_samples - correct)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(right, k))
            expected = sum(max(s) for s in subsets) / len(subsets)
            assert pass_at_k_estimate(num_samples, correct, k) == expected
            assert best_at_k_estimate(right, k) == pytest.approx(expected, abs=1e-12)


@examples(40, rewards=st.lists(st.floats(-3, 3), min_size=1, max_size=7), data=st.data())
def test_best_at_k_equals_the_mean_over_all_subsets(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    subsets = list(itertools.combinations(rewards, k))
    expected = math.fsum(max(s) for s in subsets) / len(subsets)
    assert best_at_k_estimate(rewards, k) == pytest.approx(expected, abs=1e-12)


@examples(40, num_samples=st.integers(1, 2000), data=st.data())
def test_pass_at_k_is_a_share_that_grows_with_k_and_with_success(num_samples, data):
    correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    got = pass_at_k_estimate(num_samples, correct, k)
    assert 0 <= got <= 1
    assert got <= pass_at_k_estimate(num_samples, correct, min(k + 1, num_samples))
    assert got <= pass_at_k_estimate(num_samples, min(correct + 1, num_samples), k)
    assert pass_at_k_estimate(num_samples, correct, 1) == correct / num_samples


def test_pass_at_k_of_many_samples_is_precise():
    # A product of 1 - k / i in floats loses a small chance in the last digits of 1.
    assert pass_at_k_estimate(10**6, 1, 3) == 3 / 10**6


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((4, 5, 1), "num_correct"),
        ((4, -1, 1), "num_correct"),
        ((4, 1, 5), "k: must"),
        ((4, 1, 0), "k: must"),
        ((0, 0, 1), "k: must"),
    ],
)
def test_impossible_counts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k_estimate(*arguments)


# ---------------------------------------------------------------- KL coefficient


def test_the_kl_coefficient_moves_toward_its_target():
    args = dict(target=6.0, horizon=10_000, num_samples=256)
    assert adaptive_kl_coef(0.2, kl=6.0, **args) == 0.2
    assert adaptive_kl_coef(0.2, kl=6.6, **args) == pytest.approx(0.2 * (1 + 0.1 * 0.0256))
    assert adaptive_kl_coef(0.2, kl=600.0, **args) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))
    assert adaptive_kl_coef(0.2, kl=-1.0, **args) == pytest.approx(0.2 * (1 - 0.2 * 0.0256))


@examples(40, coef=st.floats(0, 10), kl=st.floats(-100, 100), num_samples=st.integers(0, 4000))
def test_the_kl_coefficient_never_turns_negative(coef, kl, num_samples):
    got = adaptive_kl_coef(coef, kl=kl, target=0.1, horizon=1000.0, num_samples=num_samples)
    change = 0.2 * num_samples / 1000
    assert coef * (1 - change) - 1e-9 <= got <= coef * (1 + change) + 1e-9 and got >= 0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kl=math.nan), "kl: must be finite"),
        (dict(target=0.0), "coef, target, horizon"),
        (dict(horizon=0.0), "coef, target, horizon"),
        (dict(coef=-1.0), "coef, target, horizon"),
        (dict(num_samples=500), "horizon: 100 is too short for 500"),
    ],
)
def test_a_kl_controller_out_of_range_is_refused(change, message):
    arguments = dict(coef=0.1, kl=0.1, target=0.1, horizon=100, num_samples=8) | change
    with pytest.raises(ValueError, match=message):
        adaptive_kl_coef(arguments.pop("coef"), **arguments)


of_four = functools.partial(penalize_overlong, max_response_tokens=4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda r: of_four(r, r, buffer_tokens=5), "buffer_tokens"),
        (lambda r: of_four(r, r, buffer_tokens=0), "buffer_tokens"),
        (lambda r: of_four(r, r, buffer_tokens=1, penalty=-1.0), "penalty"),
        (lambda r: stop_properly(r, r > 0, factor=1.5), "factor"),
        (lambda r: stop_properly(r, r > 0, penalty=-1.0), "penalty"),
        (lambda r: scale_and_clamp(r, low=1.0, high=1.0), "low, high"),
        (lambda r: scale_and_clamp(r, scale=math.inf), "shift, scale"),
    ],
)
def test_shaping_options_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2))
