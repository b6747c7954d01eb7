"""Properties that hold for every loss, and the options that each refuses."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import registry
from spmdrl.algorithms.losses.clip import ppo_clip
from spmdrl.algorithms.losses.sequence import gspo
from spmdrl.algorithms.losses.weighted import cispo
from tests.helpers.built import examples
from tests.helpers.ragged import Ragged, assert_nothing_is_read, packed, ragged

NAMES = registry.names("loss")
SELECT = dict(select_frac=0.2, cov_low=0.0, cov_high=0.9)
OPTIONS = {
    "ppo_clip": [
        {},
        dict(clip_low=0.1, clip_high=0.28),
        dict(dual_clip=1.5),
        dict(ratio_cap=1.6),
        dict(clip_low=0.2, dual_clip=3.0, ratio_cap=4.0),
    ],
    "sapo": [{}, dict(tau_pos=0.5, tau_neg=3.0)],
    "cispo": [{}, dict(ratio_low=0.8, ratio_high=1.2)],
    "tis_pg": [{}, dict(upper=1.3)],
    "aipo": [{}, dict(upper=1.1)],
    "topr": [{}, dict(level="token", upper=1.2)],
    "kimi": [{}, dict(level="token", tau=0.7)],
    "dro": [{}, dict(level="sequence", beta=0.3)],
    "gspo": [{}, dict(clip_low=0.1, clip_high=0.1)],
    "gspo_token": [dict(clip_low=0.1, clip_high=0.1)],
    "luspo": [dict(clip_low=0.1, clip_high=0.1)],
    "gmpo": [{}, dict(clip_low=0.1, clip_high=0.2)],
    "vespo": [{}, dict(k_pos=0.0, lambda_pos=0.5, k_neg=1.0, lambda_neg=0.2)],
    "dppo_tv": [{}, dict(threshold_low=0.02, threshold_high=0.3)],
    "dppo_kl": [{}, dict(threshold_low=0.001, threshold_high=0.3)],
    "decoupled_ppo": [{}, dict(clip_low=0.1, weight_cap=1.3)],
    "a3po": [{}, dict(clip_high=0.1, weight_cap=1.1)],
    "m2po": [{}, dict(threshold=0.1)],
    "clip_cov": [SELECT],
    "kl_cov": [dict(select_frac=0.2), dict(select_frac=0.5, kl_coef=3.0)],
    "reinforce": [{}],
    "sft": [{}],
}
CASES = [(name, options) for name in NAMES for options in OPTIONS[name]]
TO_MU = ("aipo", "topr", "dro", "vespo", "dppo_tv", "dppo_kl", "a3po", "m2po")


def statistics(name: str, case: Ragged, options: dict) -> dict[str, torch.Tensor]:
    """Return a loss's scalars, were `case` the whole batch."""
    companion = getattr(registry.get("loss", name), "statistics", None)
    if companion is None:
        return {}
    columns = {k: v.detach()[case.loss_mask] for k, v in case.inputs().items() if k != "cu_seqlens"}
    known = inspect.signature(companion).parameters
    return registry.call(companion, columns, {k: v for k, v in options.items() if k in known})


def call(
    name: str, case: Ragged, batch: Ragged | None = None, **options: float
) -> tuple[torch.Tensor, dict]:
    """Call a loss on a micro-batch of `batch` (default: all of it)."""
    inputs = case.inputs() | statistics(name, batch or case, options)
    return registry.call(registry.get("loss", name), inputs | {"version": case.version}, options)


def gradient_of(terms: torch.Tensor, case: Ragged) -> torch.Tensor:
    return torch.autograd.grad(terms.sum(), case.logprobs)[0]


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name, options", CASES)
@examples(
    15, seed=st.integers(0, 10_000), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
def test_masked_tokens_have_zero_term_and_gradient_whatever_they_hold(name, options, seed, garbage):
    clean, dirty = ragged(seed), ragged(seed).dirty(garbage)
    own = functools.partial(call, name, **options)
    off = ~clean.loss_mask
    assert_nothing_is_read(own, (dirty, clean), lambda case: [case.logprobs], off=off)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("sft", "clip_cov")])
@examples(15, seed=st.integers(0, 10_000))
def test_at_ratio_one_every_loss_has_the_plain_policy_gradient(name, seed):
    # sft has no advantage, clip_cov drops tokens by covariance: each has a test of its own.
    case = ragged(seed, drift=0.0)
    terms, stats = call(name, case)
    assert torch.allclose(gradient_of(terms, case), -case.advantages * case.loss_mask, atol=1e-12)
    ratio = "policy/rollout_ratio" if name in TO_MU else "policy/ratio"
    assert stats[ratio][0] == case.loss_mask.sum()
    for key in ("policy/clip_frac", "policy/dropped_frac", "policy/dual_clip_frac"):
        assert key not in stats or stats[key][0] == 0


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "reinforce"])
def test_at_ratio_one_the_gradient_is_exact(name):
    case = ragged(4, drift=0.0)
    terms, _ = call(name, case)
    assert torch.equal(gradient_of(terms, case), -case.advantages * case.loss_mask)


@pytest.mark.parametrize("name, options", CASES)
@examples(12, seed=st.integers(0, 10_000), cut=st.integers(1, 7))
def test_splitting_and_reordering_micro_batches_changes_no_term(name, options, seed, cut):
    case = ragged(seed)
    whole, whole_stats = call(name, case, **options)
    whole_gradient = gradient_of(whole, case)
    parts, gradients, totals = {}, {}, {}
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
    for members in (order[:cut], order[cut:]):
        piece = case.select(members)
        terms, stats = call(name, piece, case, **options)
        gradient = gradient_of(terms, piece)
        cu = piece.cu_seqlens.tolist()
        parts |= {s: terms[a:b] for s, a, b in zip(members, cu, cu[1:])}
        gradients |= {s: gradient[a:b] for s, a, b in zip(members, cu, cu[1:])}
        for key, (numerator, denominator) in stats.items():
            n, d = totals.get(key, (0.0, 0.0))
            totals[key] = (n + numerator, d + denominator)
    assert torch.allclose(torch.cat([parts[s] for s in range(8)]), whole, atol=1e-12)
    together = torch.cat([gradients[s] for s in range(8)])
    assert torch.allclose(together, whole_gradient, atol=1e-12)
    for key, pair in whole_stats.items():
        assert torch.allclose(torch.stack(totals[key]), torch.stack(pair), atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_current_logprobs_carry_a_gradient(name):
    case = ragged(2)
    for tensor in (case.old_logprobs, case.rollout_logprobs, case.advantages):
        tensor.requires_grad_()
    terms, _ = call(name, case)
    terms.sum().backward()
    others = (case.old_logprobs, case.rollout_logprobs, case.advantages)
    assert case.logprobs.grad is not None and all(t.grad is None for t in others)


@pytest.mark.parametrize("name", [*TO_MU, "decoupled_ppo"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_engine_logprobs_that_are_not_finite_count_as_ratio_one(name, value):
    options = dict(threshold=100.0) if name == "m2po" else {}
    case, plain = ragged(3), ragged(3)
    plain.rollout_logprobs = plain.logprobs.detach().clone()
    if name == "decoupled_ppo":
        plain.rollout_logprobs = plain.old_logprobs
    case.rollout_logprobs[:] = value
    terms, expected = call(name, case, **options)[0], call(name, plain, **options)[0]
    assert torch.equal(terms, expected)
    assert torch.equal(gradient_of(terms, case), gradient_of(expected, plain))


# ---------------------------------------------------------------- edges


def one_token_each(ratios: list[float], advantages: list[float]) -> Ragged:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log() - 1
    return Ragged(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=torch.full_like(logprobs, -1),
        rollout_logprobs=torch.full_like(logprobs, -1),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        **packed(*[1] * len(ratios)),
    )


def test_log_ratios_beyond_twenty_stay_finite():
    for shift in (500.0, -500.0):
        case = one_token_each([1.0, 1.0], [1.0, -1.0])
        with torch.no_grad():
            case.logprobs += shift
        for name in NAMES:
            terms, _ = call(name, case)
            assert terms.isfinite().all() and gradient_of(terms, case).isfinite().all(), name


def far(*log_ratios: float) -> Ragged:
    """One sequence of tokens that have moved so far, A = 1."""
    moves = torch.tensor(log_ratios, dtype=torch.float64)
    before = torch.full_like(moves, -50.0)
    return Ragged(
        logprobs=(before + moves).requires_grad_(),
        old_logprobs=before,
        rollout_logprobs=before.clone(),
        advantages=torch.ones_like(moves),
        **packed(len(log_ratios)),
    )


@pytest.mark.parametrize("name", ["kimi", "dro"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_square_pulls_every_token_of_far_sequences(name, level):
    case = far(-30.0, 45.0, 2.0)
    terms, _ = call(name, case, level=level)
    weight = {"kimi": 0.1, "dro": 0.05}[name]
    moves = (case.logprobs - case.old_logprobs).detach()
    squares = moves**2 if level == "token" else moves * moves.sum()
    expected = weight / 2 * squares - case.logprobs.detach()
    torch.testing.assert_close(terms.detach(), expected, rtol=1e-12, atol=0)
    pull = weight * (moves if level == "token" else moves.sum().expand(3))
    torch.testing.assert_close(gradient_of(terms, case), pull - 1, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "luspo"])
def test_a_sequences_mean_counts_far_tokens_whole(name):
    case = far(-30.0, 31.0, 2.0)
    terms, stats = call(name, case, clip_low=1.0, clip_high=9.0)
    torch.testing.assert_close(-terms.detach(), torch.full((3,), math.e, dtype=torch.float64))
    total, count = stats["policy/ratio"]
    assert float(total / count) == pytest.approx(math.e)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_caps_the_weight_and_keeps_the_gradient(name):
    case = far(1.0, 4.0, 30.0)  # none of which is likely yet
    for options, cap in (
        ({}, 20.0),
        ({"ratio_cap": 3.0}, 3.0),
        ({"ratio_cap": math.inf}, math.inf),
    ):
        terms, _ = call(name, case, **options)
        weights = torch.tensor([1.0, 4.0, 20.0], dtype=torch.float64).exp().clamp(max=cap)
        torch.testing.assert_close(-terms.detach(), weights)
        torch.testing.assert_close(-gradient_of(terms, case), weights)
    with pytest.raises(ValueError, match="ratio_cap"):
        call(name, case, ratio_cap=0.0)


def test_a_logprob_that_is_not_finite_is_not_hidden_inside_the_mask():
    for current in (True, False):
        case = one_token_each([1.0, 1.0], [1.0, 1.0])
        with torch.no_grad():
            case.logprobs[0] = math.nan
            if not current:
                case.old_logprobs[0] = math.nan
        for name in NAMES:
            assert call(name, case)[0][0].isnan(), name


@pytest.mark.parametrize("name", NAMES)
def test_stats_are_detached_and_named_policy(name):
    _, stats = call(name, ragged(3))
    for key, (numerator, denominator) in stats.items():
        assert key.startswith("policy/")
        for value in (numerator, denominator):
            assert value.shape == () and value.dtype == torch.float64 and not value.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_a_dummy_micro_batch_gives_zero(name):
    case = Ragged(
        **{
            k: torch.zeros(1, dtype=torch.float64, requires_grad=k == "logprobs")
            for k in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
        },
        loss_mask=torch.zeros(1, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
    )
    terms, stats = call(name, case)
    terms.sum().backward()
    assert terms.tolist() == [0] and case.logprobs.grad.tolist() == [0]
    assert all(float(n) == float(d) == 0 for n, d in stats.values())


# ---------------------------------------------------------------- options


def raises(message: str, function: Callable, **options: float) -> None:
    case = ragged(0)
    inputs = {name: torch.zeros((), dtype=torch.float64) for name in registry.inputs_of(function)}
    with pytest.raises(ValueError, match=message):
        registry.call(function, inputs | case.inputs() | {"version": case.version}, options)


def test_bounds_out_of_range_are_refused():
    raises("clip_low, clip_high", ppo_clip, clip_low=1.5)
    raises("dual_clip: must be above 1", ppo_clip, dual_clip=0.5)
    raises("ratio_cap: must be above 1 . clip_high = 1.2", ppo_clip, ratio_cap=1.1)
    raises("ratio_low, ratio_high", cispo, ratio_high=0.2)
    raises("clip_low, clip_high", gspo, clip_high=-1.0)


@pytest.mark.parametrize(
    "name, option, value",
    [
        ("sapo", "tau_pos", 0.0),
        ("sapo", "tau_neg", math.nan),
        ("tis_pg", "upper", -1.0),
        ("aipo", "upper", 0.0),
        ("topr", "upper", 0.0),
        ("topr", "level", "row"),
        ("kimi", "tau", -0.1),
        ("kimi", "level", "batch"),
        ("dro", "beta", math.nan),
        ("dro", "level", ""),
        ("gspo_token", "clip_low", 2.0),
        ("luspo", "clip_low", -0.1),
        ("gmpo", "clip_low", -0.4),
        ("gmpo", "clip_high", math.inf),
        ("vespo", "k_pos", -1.0),
        ("vespo", "lambda_neg", 0.0),
        ("dppo_tv", "threshold_low", -0.1),
        ("dppo_kl", "threshold_high", math.nan),
        ("decoupled_ppo", "clip_high", -1.0),
        ("decoupled_ppo", "weight_cap", -1.0),
        ("a3po", "clip_low", 1.1),
        ("a3po", "weight_cap", math.nan),
        ("m2po", "threshold", 0.0),
        ("clip_cov", "select_frac", 0.0),
        ("clip_cov", "cov_low", 6.0),
        ("clip_cov", "clip_low", 1.1),
        ("kl_cov", "select_frac", 1.1),
        ("kl_cov", "kl_coef", -1.0),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(name, option, value):
    raises(f"{option}.*{value}", registry.get("loss", name), **{option: value})
