"""Mismatch corrections and metrics against plain loops, at every level, with their traps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import corrections, registry
from spmdrl.algorithms.mismatch import (
    NUM_GAP_BINS,
    carried_stats,
    gap_histogram,
    gap_max,
    gap_quantile,
    mismatch_stats,
)
from tests.helpers.built import examples
from tests.helpers.ragged import Ragged, packed, ragged

LEVELS = ("token", "sequence", "geometric")
LEVELLED = [
    (name, dict(level=level, **options))
    for name, options in (
        ("tis", dict(upper=1.3)),
        ("mis", dict(lower=0.6, upper=1.6)),
        ("icepop", dict(lower=0.7, upper=1.4)),
    )
    for level in LEVELS
]
DROPPING = [
    ("sequence_mask", dict(level="geometric", lower=0.85, upper=1.2)),
    ("sequence_mask", dict(level="sequence", lower=0.5, upper=3.0)),
    ("seq_mask_tis", dict(lower=0.85, upper=1.2, token_upper=1.1)),
    ("veto", dict(lower=0.5, upper=2.0)),
    ("veto", {}),
    ("opsm", dict(delta=0.05)),
    ("opsm", {}),
    ("vaco", dict(bound=0.1, upper=1.5)),
    ("vaco", dict(bound=5.0)),
]
CASES = LEVELLED + DROPPING


def call(name: str, case: Ragged, **options) -> tuple[torch.Tensor, dict]:
    inputs = case.inputs()
    if name == "vaco":
        inputs |= corrections.vaco.statistics(**columns(case))
    return registry.call(getattr(corrections, name), inputs, options)


def columns(case: Ragged) -> dict[str, torch.Tensor]:
    """Return the loss tokens alone, by name, as a method's statistics see them."""
    return {
        name: getattr(case, name)[case.loss_mask] for name in ("old_logprobs", "rollout_logprobs")
    }


def reference(name: str, case: Ragged, options: dict) -> list[float]:
    old, mu, adv = (x.tolist() for x in (case.old_logprobs, case.rollout_logprobs, case.advantages))
    log = [o - m if math.isfinite(m) else 0.0 for o, m in zip(old, mu)]
    out = [0.0] * len(old)
    tokens = [t for t in range(len(old)) if case.loss_mask[t]]
    gap = sum(abs(math.exp(log[t]) - 1) for t in tokens) / len(tokens)
    for row in case.rows():
        kept = [t for t in row if case.loss_mask[t]]
        total = sum(log[t] for t in kept)
        mean = total / max(len(kept), 1)
        for t in kept:
            rho = math.exp(log[t])
            at = {"token": log[t], "sequence": total, "geometric": mean}
            level = math.exp(at[options.get("level", "geometric")])
            keep, weight = True, 1.0
            if name == "tis":
                weight = min(level, options["upper"])
            elif name in ("mis", "icepop"):
                keep, weight = options["lower"] <= level <= options["upper"], level
            elif name in ("sequence_mask", "seq_mask_tis"):
                keep = options["lower"] <= level <= options["upper"]
                weight = min(rho, options["token_upper"]) if name == "seq_mask_tis" else 1.0
            elif name == "veto":
                low, high = options.get("lower", 1e-4), options.get("upper", 1e2)
                keep = all(low <= math.exp(log[u]) <= high for u in kept)
            elif name == "opsm":
                keep = not (adv[t] < 0 and -mean > options.get("delta", 1e-4))
            else:
                keep = gap <= options["bound"] or adv[t] * (rho - 1) <= 0
                weight = min(rho, options.get("upper", 2.0))
            out[t] = weight if keep else 0.0
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name, options", CASES)
def test_weights_equal_a_plain_loop(name, options, seed):
    case = ragged(seed)
    case.rollout_logprobs[4] = math.nan
    weights, stats = call(name, case, **options)
    expected = torch.tensor(reference(name, case, options), dtype=torch.float64)
    assert (weights - expected).abs().max() < 1e-10
    assert torch.isclose(stats["policy/correction_weight"][0], expected.sum())
    assert stats["policy/correction_weight"][1] == case.loss_mask.sum()
    assert stats["policy/correction_cut_frac"][1] == case.loss_mask.sum()
    assert stats["policy/correction_cut_frac"][0] >= (expected[case.loss_mask] == 0).sum()
    weights, _ = call(name, case.single(), **options)
    assert weights.dtype == torch.float32 and (weights - expected).abs().max() < 1e-5


def test_dropping_options_of_these_tests_do_drop_something_and_not_everything():
    for name, options in DROPPING:
        found = [
            call(name, ragged(seed), **options)[0][ragged(seed).loss_mask] > 0 for seed in range(6)
        ]
        has_strict_bounds = name != "veto" or options
        assert torch.cat(found).any()
        assert not torch.cat(found).all() or not has_strict_bounds or options == dict(bound=5.0)


@pytest.mark.parametrize("name, options", CASES)
@examples(15, seed=st.integers(0, 10_000))
def test_weights_are_constants_and_ignore_masked_tokens(name, options, seed):
    case, dirty = ragged(seed), ragged(seed).dirty(math.nan, rollout_logprobs=-math.inf)
    dirty.old_logprobs.requires_grad_()
    (got, stats), (clean, clean_stats) = (call(name, c, **options) for c in (dirty, case))
    assert not got.requires_grad and torch.equal(got, clean) and stats == clean_stats
    assert (got[~case.loss_mask] == 0).all()


@pytest.mark.parametrize("name, options", DROPPING)
@examples(6, seed=st.integers(0, 10_000))
def test_dropping_does_not_depend_on_packing_or_micro_batches(name, options, seed):
    case = ragged(seed)
    inputs = corrections.vaco.statistics(**columns(case)) if name == "vaco" else {}
    whole, _ = registry.call(getattr(corrections, name), case.inputs() | inputs, options)
    rows = case.rows()
    for s in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist():
        part = case.select([s]).inputs()
        weights, _ = registry.call(getattr(corrections, name), part | inputs, options)
        assert torch.equal(weights, whole[rows[s].start : rows[s].stop])


@pytest.mark.parametrize(
    "name, options",
    [(name, {}) for name in ("sequence_mask", "seq_mask_tis", "veto", "opsm", "vaco")]
    + [(name, dict(level=options["level"])) for name, options in LEVELLED],
)
def test_equal_policies_get_weight_exactly_one(name, options):
    case = ragged(2, drift=0.0)
    weights, stats = call(name, case, **options)
    assert torch.equal(weights, case.loss_mask.double())
    assert stats["policy/correction_cut_frac"][0] == 0


def test_none_is_one_on_the_mask():
    case = ragged(2)
    weights, stats = call("none", case)
    assert torch.equal(weights, case.loss_mask.double()) and stats == {}


def two_tokens(rhos: list[float]) -> Ragged:
    old = torch.tensor(rhos, dtype=torch.float64).log() - 1
    mu = torch.full_like(old, -1)
    return Ragged(
        logprobs=old, old_logprobs=old, rollout_logprobs=mu, advantages=mu, **packed(len(rhos))
    )


def test_bounds_are_on_rho_and_not_on_its_inverse():
    case = two_tokens([0.3, 3.0])
    weights, stats = call("icepop", case, lower=0.5, upper=5.0)
    assert weights.tolist() == pytest.approx([0.0, 3.0])  # bounds on 1/rho would keep the other
    assert float(stats["policy/correction_cut_frac"][0]) == 1
    assert call("tis", case, upper=2.0)[0].tolist() == pytest.approx([0.3, 2.0])


def test_levels_see_the_token_the_product_and_the_geometric_mean():
    case = two_tokens([2.0, 2.0])
    found = {level: call("tis", case, level=level, upper=100.0)[0][0].item() for level in LEVELS}
    assert found == pytest.approx(dict(token=2.0, sequence=4.0, geometric=2.0))


def test_a_kept_sequence_has_weight_one_under_a_mask_and_rho_under_mis():
    case = two_tokens([1.5, 1.5])
    assert call("sequence_mask", case, lower=0.5, upper=2.0)[0].tolist() == [1.0, 1.0]
    kept = call("mis", case, level="geometric", lower=0.5, upper=2.0)[0]
    assert kept.tolist() == pytest.approx([1.5, 1.5])


def test_sequence_masks_bound_rho_and_not_its_inverse():
    for level, rho in (("geometric", 3.0), ("sequence", 9.0)):
        case = two_tokens([3.0, 3.0])
        for name in ("sequence_mask",) + ("seq_mask_tis",) * (level == "geometric"):
            options = dict(level=level) if name == "sequence_mask" else {}
            inside, _ = call(name, case, lower=0.5, upper=rho + 0.01, **options)
            outside, _ = call(name, case, lower=1 / rho - 0.01, upper=rho - 0.01, **options)
            assert (inside > 0).all() and (outside == 0).all()


def test_one_outlier_vetoes_its_sequence_and_no_other():
    case = two_tokens([1.0, 150.0, 1.0, 5e-5, 1.0, 90.0])
    case.cu_seqlens = torch.tensor([0, 2, 4, 4, 6], dtype=torch.int32)
    weights, stats = call("veto", case)
    assert weights.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert float(stats["policy/correction_cut_frac"][0]) == 4


def test_an_outlier_off_the_loss_mask_vetoes_nothing():
    case = two_tokens([1.0, 1e6])
    case.loss_mask[1] = False
    assert call("veto", case)[0].tolist() == [1.0, 0.0]
    case = two_tokens([0.3, 0.3])
    case.loss_mask[1] = False
    assert call("veto", case, lower=0.0, upper=0.5)[0].tolist() == [1.0, 0.0]


def test_opsm_keeps_positive_advantages_and_drift_the_other_way():
    cases = ((0.5, -1.0, 0.0), (0.5, 1.0, 1.0), (2.0, -1.0, 1.0), (0.5, 0.0, 1.0))
    for rho, advantage, kept in cases:
        case = two_tokens([rho, rho])
        case.advantages = torch.full((2,), advantage, dtype=torch.float64)
        assert call("opsm", case, delta=0.1)[0].tolist() == [kept, kept]


def test_vaco_drops_what_moves_away_only_while_the_batch_is_too_far():
    case = two_tokens([1.5, 1.5, 0.5, 0.5, 1.0])
    case.advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    gap = corrections.vaco.statistics(**columns(case))["mean_ratio_gap"]
    assert float(gap) == pytest.approx(0.4)
    assert call("vaco", case, bound=0.3)[0].tolist() == pytest.approx([0, 1.5, 0.5, 0, 1])
    assert call("vaco", case, bound=0.5)[0].tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5, 1])


@examples(15, seed=st.integers(0, 10_000))
def test_vaco_statistics_do_not_depend_on_the_order_of_tokens(seed):
    found = columns(ragged(seed))
    order = torch.randperm(len(found["old_logprobs"]), generator=torch.Generator().manual_seed(3))
    permuted = {name: column[order] for name, column in found.items()}
    assert corrections.vaco.statistics(**found) == corrections.vaco.statistics(**permuted)


def test_vaco_statistics_count_a_missing_engine_logprob_as_ratio_one():
    case = two_tokens([3.0, 3.0])
    case.rollout_logprobs[0] = math.nan
    gap = corrections.vaco.statistics(**columns(case))["mean_ratio_gap"]
    assert float(gap) == pytest.approx(1.0)
    case.loss_mask[:] = False
    assert float(corrections.vaco.statistics(**columns(case))["mean_ratio_gap"]) == 0


def test_huge_ratios_stay_finite():
    case = two_tokens([1.0, 1.0])
    case.rollout_logprobs -= 5000.0
    assert call("mis", case, level="sequence")[0].tolist() == [0.0, 0.0]
    assert call("tis", case, level="sequence")[0].tolist() == [2.0, 2.0]


def test_values_out_of_range_are_refused():
    case = two_tokens([1.0])
    for name, options, message in (
        ("tis", dict(upper=0.0), "upper: must be above 0"),
        ("mis", dict(lower=2.0, upper=1.0), "0 <= lower < upper, got 2.0, 1.0"),
        ("tis", dict(level="tokens"), "level: must be token, sequence or geometric"),
        ("sequence_mask", dict(level="token"), "level: must be sequence or geometric"),
        ("sequence_mask", dict(lower=2.0), "0 <= lower < upper, got 2.0, 1.01"),
        ("seq_mask_tis", dict(token_upper=0.0), "token_upper: must be above 0"),
        ("veto", dict(lower=-1.0), "0 <= lower < upper, got -1.0"),
        ("opsm", dict(delta=-0.1), "delta: must be at least 0"),
        ("vaco", dict(bound=0.0), "bound: must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call(name, case, **options)


# ---------------------------------------------------------------- metrics


def values(case: Ragged) -> dict[str, float]:
    stats = mismatch_stats(
        case.old_logprobs,
        case.rollout_logprobs,
        loss_mask=case.loss_mask,
        cu_seqlens=case.cu_seqlens,
    )
    return {k: float(n / d) for k, (n, d) in stats.items()}


def test_tokens_that_newer_weights_drew_within_a_turn_are_counted_and_compared():
    # Two sequences: a prompt of two tokens, a turn, an answer, a turn; a prompt of one, a turn.
    versions = [-1, -1, 5, 5, 6, 7, -1, 7, 7, -1, 6, 7, 7]
    in_loss = [v >= 0 for v in versions[:-1]] + [False]  # the last one was filtered out
    old = torch.linspace(-3.0, -0.1, len(versions))
    gaps = torch.tensor([0.01 * 2**i * (-1) ** i for i in range(len(versions))])
    stats = carried_stats(
        old,
        old - gaps,
        policy_versions=torch.tensor(versions),
        version=torch.tensor(7),
        loss_mask=torch.tensor(in_loss),
    )
    found = {name.removeprefix("policy/"): float(n / d) for name, (n, d) in stats.items()}
    assert found["carried_frac"] == pytest.approx(3 / 8)
    assert found["carried_age"] == pytest.approx((1 + 2 + 1) / 3)
    assert found["carried_gap"] == pytest.approx(0.01 * (2**5 + 2**11) / 2, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_mismatch_metrics_equal_plain_loops(seed):
    case = ragged(seed)
    both = list(zip(case.old_logprobs.tolist(), case.rollout_logprobs.tolist()))
    pairs = [[both[t] for t in row if case.loss_mask[t]] for row in case.rows()]
    pairs = [p for p in pairs if p]  # rows masked whole and empty ones enter nothing
    flat = [pair for p in pairs for pair in p]
    rho = [math.exp(o - m) for o, m in flat]
    n = len(flat)
    expected = {
        "policy/mismatch_k1": sum(m - o for o, m in flat) / n,
        "policy/mismatch_k3": sum(r - 1 - math.log(r) for r in rho) / n,
        "policy/mismatch_prob_diff": sum(abs(math.exp(o) - math.exp(m)) for o, m in flat) / n,
        "policy/mismatch_logprob_diff": sum(abs(o - m) for o, m in flat) / n,
        "policy/mismatch_ratio": sum(rho) / n,
        "policy/mismatch_ess": n / sum(r * r for r in rho),
        "policy/mismatch_seq_k1": sum(sum(m - o for o, m in p) / len(p) for p in pairs)
        / len(pairs),
        "policy/mismatch_outside_frac": sum(not 0.5 <= r <= 2 for r in rho) / n,
        "policy/mismatch_nan_frac": 0.0,
    }
    assert values(case) == pytest.approx(expected, abs=1e-10)


def test_fully_masked_rows_do_not_dilute_a_mean():
    case = two_tokens([0.5, 0.5])
    before = values(case)
    padded = Ragged(
        **{
            k: torch.cat([v, torch.zeros_like(v)])
            for k, v in vars(case).items()
            if k != "cu_seqlens"
        },
        cu_seqlens=torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32),
    )
    assert values(padded) == before
    assert before["policy/mismatch_seq_k1"] == pytest.approx(math.log(2))


def test_engine_logprobs_that_are_not_finite_count_as_ratio_one_and_are_counted():
    case = two_tokens([2.0, 2.0, 2.0, 2.0])
    case.rollout_logprobs[1:3] = torch.tensor([math.nan, -math.inf], dtype=torch.float64)
    found = values(case)
    assert found["policy/mismatch_nan_frac"] == 0.5
    assert found["policy/mismatch_ratio"] == pytest.approx(1.5)
    assert call("tis", case)[0].tolist() == pytest.approx([2.0, 1.0, 1.0, 2.0])


# ---------------------------------------------------------------- gap histogram


def gaps(case: Ragged) -> list[float]:
    pairs = zip(case.old_logprobs.tolist(), case.rollout_logprobs.tolist(), case.loss_mask)
    return sorted(abs(math.exp(o) - math.exp(m)) for o, m, kept in pairs if kept)


def histogram(case: Ragged) -> torch.Tensor:
    return gap_histogram(case.old_logprobs, case.rollout_logprobs, loss_mask=case.loss_mask)


@examples(
    30,
    seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    drift=st.sampled_from([1e-4, 1e-2, 0.4, 3.0]),
    frac=st.floats(0.01, 1.0),
)
def test_histograms_add_up_and_give_the_quantile_and_the_maximum(seeds, drift, frac):
    cases = [ragged(seed, drift=drift) for seed in seeds]
    for case in cases:
        case.rollout_logprobs.clamp_(max=0.0)  # a probability
    total = sum(histogram(case) for case in cases)
    flat = sorted(gap for case in cases for gap in gaps(case))
    assert total.shape == (NUM_GAP_BINS,) and float(total.sum()) == len(flat)
    rank = max(1, math.ceil(frac * len(flat) - 1e-9))
    found, exact = float(gap_quantile(total, frac)), flat[rank - 1]
    assert abs(found - exact) <= 0.024 * exact + 1e-8
    assert flat[-1] * (1 - 1e-9) <= float(gap_max(total)) <= 1.048 * flat[-1] + 1e-8


def test_p999_ignores_one_outlier_in_ten_thousand_and_the_maximum_shows_it():
    case = two_tokens([1.001] * 9999 + [2.0])
    total = histogram(case)
    assert float(gap_quantile(total, 0.999)) == pytest.approx(0.001 * math.exp(-1), rel=0.024)
    assert float(gap_max(total)) == pytest.approx(math.exp(-1), rel=0.048)


def test_histogram_counts_what_is_not_finite_and_nothing_off_the_mask():
    case = two_tokens([1.0, 1.0, 1.0, 1.0])
    case.old_logprobs[0], case.rollout_logprobs[1] = math.nan, math.nan
    case.old_logprobs[2] = math.inf
    case.loss_mask[3] = False
    case.old_logprobs[3] = math.nan
    total = histogram(case)
    assert total.sum() == 3 and total[-1] == 2 and total[0] == 1


def test_an_empty_histogram_reads_zero_and_a_share_out_of_range_is_refused():
    empty = torch.zeros(NUM_GAP_BINS, dtype=torch.float64)
    assert float(gap_max(empty)) == float(gap_quantile(empty, 0.999)) == 0
    with pytest.raises(ValueError, match="frac: must be in"):
        gap_quantile(empty, 0.0)
