"""Losses on a few tokens whose values one can work out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from spmdrl.algorithms.losses.weighted import reinforce, sft
from tests.algorithms.test_losses import call, gradient_of, one_token_each
from tests.helpers.ragged import ragged


@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("ppo_clip", {}, [-0.5, 1.0, -2.4]),
        ("decoupled_ppo", {}, [-0.5, 1.0, -2.4]),
        ("a3po", {}, [-0.5, 1.0, -2.4]),
        ("clip_cov", dict(cov_low=50.0, cov_high=60.0), [-0.5, 1.0, -2.4]),
        ("gspo", dict(clip_low=0.2, clip_high=0.2), [-0.5, 1.0, -2.4]),
        ("gspo_token", dict(clip_low=0.2, clip_high=0.2), [-0.5, 1.0, -2.4]),
        ("luspo", dict(clip_low=0.2, clip_high=0.2), [-0.5, 1.0, -2.4]),
        ("gmpo", dict(clip_low=-math.log(0.8), clip_high=math.log(1.2)), [-0.5, 1.0, -2.4]),
        ("dppo_tv", dict(threshold_high=0.19), [-0.5, 1.0, -3.0]),  # 0.5 / e = 0.184
        ("dppo_tv", dict(threshold_high=0.18), [-0.5, 1.0, 0.0]),
        ("m2po", {}, [-0.5, 1.0, -3.0]),
        ("kl_cov", dict(kl_coef=0.0), [-0.5, 1.0, -3.0]),
    ],
)
def test_clip_table(name, options, expected):
    case = one_token_each([0.5, 1.0, 1.5], [1.0, -1.0, 2.0])
    terms, stats = call(name, case, **options)
    assert terms.tolist() == pytest.approx(expected)
    assert all(float(count) == 3 for _, count in stats.values())
    if "policy/clip_frac" in stats:
        assert float(stats["policy/clip_frac"][0]) == 1
        assert float(stats["policy/clip_high_frac"][0]) == 1


def test_low_and_high_bounds_are_separate():
    case = one_token_each([0.7, 1.25, 1.25, 0.7], [-1.0, 1.0, -1.0, 1.0])
    terms, stats = call("ppo_clip", case, clip_low=0.1, clip_high=0.28)
    assert terms.tolist() == pytest.approx([0.9, -1.25, 1.25, -0.7])
    assert [float(stats[f"policy/clip_{side}_frac"][0]) for side in ("low", "high")] == [1, 0]


def test_dual_clip_and_ratio_cap_bound_negative_advantages():
    case = one_token_each([10.0, 10.0], [-1.0, 1.0])
    for options, bound in ((dict(dual_clip=3.0), 3.0), (dict(ratio_cap=4.0), 4.0)):
        terms, stats = call("ppo_clip", case, **options)
        assert terms.tolist() == pytest.approx([bound, -1.2])
        assert gradient_of(terms, case).tolist() == [0, 0]
        assert float(stats["policy/dual_clip_frac"][0]) == 1
        assert float(stats["policy/clip_frac"][0]) == 2


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    case = one_token_each([10.0], [2.0])
    terms, stats = call("cispo", case)
    assert gradient_of(terms, case).tolist() == pytest.approx([-10.0])  # 5 * 2
    assert float(stats["policy/clip_high_frac"][0]) == 1


def test_sapo_fades_on_both_sides_and_faster_for_negative_advantages():
    case = one_token_each([0.5, 1.0, 1.5, 3.0], [1.0] * 4)
    up = (-gradient_of(call("sapo", case, tau_pos=2.0)[0], case)).tolist()
    assert up[1] == pytest.approx(1) and up[0] < 0.5 and up[2] < 1.5 and up[3] < up[2]
    terms, _ = call("sapo", one_token_each([1.0, 1.0], [1.0, -1.0]), tau_pos=2.0, tau_neg=4.0)
    assert terms.tolist() == pytest.approx([-1.0, 0.5])  # 2 A / tau
    down = one_token_each([3.0] * 4, [-1.0] * 4)
    positive = gradient_of(call("sapo", case)[0], case)[3]
    assert gradient_of(call("sapo", down)[0], down)[0] < -positive


def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage():
    case, other = ragged(8), ragged(8)
    bounds = dict(clip_low=0.1, clip_high=0.1)
    one, two = call("gspo", case, **bounds)[0], call("gspo_token", other, **bounds)[0]
    assert torch.allclose(one, two, atol=1e-14)
    assert torch.allclose(gradient_of(one, case), gradient_of(two, other), atol=1e-14)


def test_decoupled_ppo_is_ppo_times_the_detached_weight():
    case, other = ragged(8), ragged(8)
    weight = (case.old_logprobs - case.rollout_logprobs).exp()
    one, two = call("decoupled_ppo", case)[0], call("ppo_clip", other)[0] * weight
    assert torch.allclose(one, two, atol=1e-14)
    assert torch.allclose(gradient_of(one, case), gradient_of(two, other), atol=1e-14)


def test_a3po_is_decoupled_ppo_where_its_guess_is_right():
    case = ragged(8)
    age = (case.version - case.policy_versions).double()
    gap = case.logprobs.detach() - case.rollout_logprobs
    case.old_logprobs = case.rollout_logprobs + age / (age + 1) * gap
    one, two = call("a3po", case)[0], call("decoupled_ppo", case)[0]
    assert torch.allclose(one, two, atol=1e-14)


def test_a3po_moves_the_anchor_with_the_age_of_a_token():
    # log w = log 2 each; the anchor is s / (s + 1) of the way from mu to pi.
    case = one_token_each([2.0] * 5, [-1.0] * 5)
    case.policy_versions = int(case.version) - torch.tensor([0, 1, 3, -2, 10])
    case.policy_versions[4] = -1  # unknown: as fresh as one from the future
    _, stats = call("a3po", case)
    ratios = [2.0, 2**0.5, 2**0.25, 2.0, 2.0]
    assert float(stats["policy/ratio"][0]) == pytest.approx(sum(ratios))
    terms, stats = call("a3po", case, weight_cap=1.5)  # 2 / ratio: 1, 1.41, 1.68, 1, 1
    assert terms.tolist() == pytest.approx([2.0, 2.0, 0.0, 2.0, 2.0])
    assert float(stats["policy/dropped_frac"][0]) == 1


def test_dropped_tokens_have_no_gradient_and_stay_in_the_count():
    case = one_token_each([3.0, 1.1], [1.0, 1.0])
    for name in ("dppo_tv", "dppo_kl"):
        terms, stats = call(name, case)
        assert terms[0] == 0 and gradient_of(terms, case).tolist() == pytest.approx([0.0, -1.1])
        assert [float(v) for v in stats["policy/dropped_frac"]] == [1.0, 2.0]
        back = one_token_each([3.0, 0.1], [-1.0, 1.0])  # A pushes back towards mu
        assert float(call(name, back)[1]["policy/dropped_frac"][0]) == 0


def test_dppo_kl_is_finite_at_probability_one():
    case = one_token_each([1.0] * 4, [1.0, 1.0, -1.0, -1.0])
    with torch.no_grad():
        case.logprobs[:] = torch.tensor([0.0, 1e-9, 0.0, -1.0])
        case.rollout_logprobs[:] = torch.tensor([0.0, -0.5, -1e-300, 0.0])
    terms, _stats = call("dppo_kl", case)
    assert terms.isfinite().all()
    # pi = 1 against mu < 1 is infinitely far, and so is mu = 1 against pi < 1.
    assert (terms == 0).tolist() == [False, True, False, True]


def test_topr_leaves_positives_alone_and_takes_the_ratio_of_the_sequence():
    case = one_token_each([0.5, 4.0, 0.5, 4.0], [1.0, 1.0, -1.0, -1.0])
    case.cu_seqlens = torch.tensor([0, 2, 4], dtype=torch.int32)
    for level, weights in (("token", [1, 1, 0.5, 1]), ("sequence", [1, 1, 1, 1])):
        gradient = gradient_of(call("topr", case, level=level)[0], case)
        expected = [-w * a for w, a in zip(weights, case.advantages.tolist())]
        assert gradient.tolist() == pytest.approx(expected)


def test_reinforce_and_sft_are_one_formula_at_advantage_one():
    case = ragged(5)
    one, _ = reinforce(
        case.logprobs,
        case.old_logprobs,
        loss_mask=case.loss_mask,
        advantages=torch.ones_like(case.advantages),
    )
    other, stats = sft(case.logprobs, loss_mask=case.loss_mask)
    assert torch.equal(one, other)
    assert torch.isclose(stats["policy/nll"][0], other.sum())
    assert torch.equal(gradient_of(other, case), -case.loss_mask.double())
