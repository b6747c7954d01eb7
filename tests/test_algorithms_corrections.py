"""Mismatch corrections and metrics against plain loops, at every level, with their traps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged, ragged

from spmdrl.algorithms import registry
from spmdrl.algorithms.mismatch import mismatch_stats

LEVELS = ("token", "sequence", "geometric")
OPTIONS = {"tis": dict(upper=1.3), "mis": dict(lower=0.6, upper=1.6),
           "icepop": dict(lower=0.7, upper=1.4)}
CASES = [(name, level) for name in OPTIONS for level in LEVELS]


def call(name: str, case: Ragged, **options) -> tuple[torch.Tensor, dict]:
    return registry.call(registry.get("correction", name), case.inputs(), options)


def reference(name: str, case: Ragged, level: str, options: dict) -> list[float]:
    old, mu = case.old_logprobs.tolist(), case.rollout_logprobs.tolist()
    out = [0.0] * len(old)
    for row in case.rows():
        kept = [t for t in row if case.loss_mask[t]]
        logs = {t: old[t] - mu[t] if math.isfinite(mu[t]) else 0.0 for t in kept}
        for t in kept:
            rho = math.exp({"token": logs[t], "sequence": sum(logs.values()),
                            "geometric": sum(logs.values()) / len(kept)}[level])
            if name == "tis":
                out[t] = min(rho, options["upper"])
            else:
                out[t] = rho if options["lower"] <= rho <= options["upper"] else 0.0
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name, level", CASES)
def test_weights_equal_a_plain_loop(name: str, level: str, seed: int) -> None:
    case = ragged(seed)
    case.rollout_logprobs[4] = math.nan
    weights, stats = call(name, case, level=level, **OPTIONS[name])
    expected = torch.tensor(reference(name, case, level, OPTIONS[name]), dtype=torch.float64)
    assert (weights - expected).abs().max() < 1e-10
    assert torch.isclose(stats["policy/correction_weight"][0], expected.sum())
    assert stats["policy/correction_weight"][1] == case.loss_mask.sum()


@pytest.mark.parametrize("name, level", CASES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_weights_are_constants_and_ignore_masked_tokens(name, level, seed) -> None:
    case, dirty = ragged(seed), ragged(seed)
    dirty.old_logprobs[~dirty.loss_mask] = math.nan
    dirty.rollout_logprobs[~dirty.loss_mask] = -math.inf
    dirty.old_logprobs.requires_grad_()
    got, _ = call(name, dirty, level=level, **OPTIONS[name])
    clean, _ = call(name, case, level=level, **OPTIONS[name])
    assert not got.requires_grad and torch.equal(got, clean)
    assert (got[~case.loss_mask] == 0).all()


@pytest.mark.parametrize("name, level", CASES)
def test_equal_policies_get_weight_exactly_one(name: str, level: str) -> None:
    case = ragged(2, drift=0.0)
    weights, stats = call(name, case, level=level)
    assert torch.equal(weights, case.loss_mask.double())
    assert stats["policy/correction_cut_frac"][0] == 0


def test_none_is_one_on_the_mask() -> None:
    case = ragged(2)
    weights, stats = call("none", case)
    assert torch.equal(weights, case.loss_mask.double()) and stats == {}


def two_tokens(rhos: list[float]) -> Ragged:
    old = torch.tensor(rhos, dtype=torch.float64).log() - 1
    mu = torch.full_like(old, -1)
    return Ragged(logprobs=old, old_logprobs=old, rollout_logprobs=mu, advantages=mu,
                  loss_mask=torch.ones(len(rhos), dtype=torch.bool),
                  cu_seqlens=torch.tensor([0, len(rhos)], dtype=torch.int32))


def test_bounds_are_on_rho_and_not_on_its_inverse() -> None:
    case = two_tokens([0.3, 3.0])
    weights, stats = call("icepop", case, lower=0.5, upper=5.0)
    assert weights.tolist() == pytest.approx([0.0, 3.0])  # bounds on 1/rho would keep the other
    assert float(stats["policy/correction_cut_frac"][0]) == 1
    assert call("tis", case, upper=2.0)[0].tolist() == pytest.approx([0.3, 2.0])


def test_levels_see_the_token_the_product_and_the_geometric_mean() -> None:
    case = two_tokens([2.0, 2.0])
    found = {level: call("tis", case, level=level, upper=100.0)[0][0].item() for level in LEVELS}
    assert found == pytest.approx(dict(token=2.0, sequence=4.0, geometric=2.0))


def test_huge_ratios_stay_finite() -> None:
    case = two_tokens([1.0, 1.0])
    case.rollout_logprobs -= 5000.0
    assert call("mis", case, level="sequence")[0].tolist() == [0.0, 0.0]
    assert call("tis", case, level="sequence")[0].tolist() == [2.0, 2.0]


def test_values_out_of_range_are_refused() -> None:
    case = two_tokens([1.0])
    for name, options, message in (
        ("tis", dict(upper=0.0), "upper: must be above 0"),
        ("mis", dict(lower=2.0, upper=1.0), "0 <= lower < upper, got 2.0, 1.0"),
        ("tis", dict(level="tokens"), "level: must be token, sequence or geometric"),
    ):
        with pytest.raises(ValueError, match=message):
            call(name, case, **options)


# ---------------------------------------------------------------- metrics


def values(case: Ragged) -> dict[str, float]:
    stats = mismatch_stats(case.old_logprobs, case.rollout_logprobs, loss_mask=case.loss_mask,
                           cu_seqlens=case.cu_seqlens)
    return {k: float(n / d) for k, (n, d) in stats.items()}


@pytest.mark.parametrize("seed", range(4))
def test_mismatch_metrics_equal_plain_loops(seed: int) -> None:
    case = ragged(seed)
    pairs = [[(case.old_logprobs[t].item(), case.rollout_logprobs[t].item())
              for t in row if case.loss_mask[t]] for row in case.rows()]
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
        "policy/mismatch_nan_frac": 0.0,
    }
    assert values(case) == pytest.approx(expected, abs=1e-10)


def test_fully_masked_rows_do_not_dilute_a_mean() -> None:
    case = two_tokens([0.5, 0.5])
    before = values(case)
    padded = Ragged(**{k: torch.cat([v, torch.zeros_like(v)]) for k, v in vars(case).items()
                       if k != "cu_seqlens"},
                    cu_seqlens=torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32))
    assert values(padded) == before
    assert before["policy/mismatch_seq_k1"] == pytest.approx(math.log(2))


def test_engine_logprobs_that_are_not_finite_count_as_ratio_one_and_are_counted() -> None:
    case = two_tokens([2.0, 2.0, 2.0, 2.0])
    case.rollout_logprobs[1:3] = torch.tensor([math.nan, -math.inf], dtype=torch.float64)
    found = values(case)
    assert found["policy/mismatch_nan_frac"] == 0.5
    assert found["policy/mismatch_ratio"] == pytest.approx(1.5)
    assert call("tis", case)[0].tolist() == pytest.approx([2.0, 1.0, 1.0, 2.0])
