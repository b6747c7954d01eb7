"""The whole-batch scalars of m2po, clip_cov and kl_cov, and the lots of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import registry
from spmdrl.algorithms.losses import batchwise
from spmdrl.algorithms.losses.batchwise import clip_cov, kl_cov, m2po
from tests.algorithms.test_losses import call, one_token_each, statistics
from tests.algorithms.test_losses_parity import lot
from tests.helpers.built import examples
from tests.helpers.ragged import ragged

SCALARS = {
    m2po: ["m2_cut"],
    clip_cov: ["mean_advantage", "mean_logprob", "select_probability"],
    kl_cov: ["mean_advantage", "mean_logprob", "cov_cut"],
}
FINITE = st.integers(-8, 8).map(lambda x: x / 2)  # exact sums, and ties are common
COLUMNS = st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=0, max_size=40)
TENTHS = FINITE.map(lambda x: x / 5)  # ties too, and sums that depend on the order
ROUGH = st.lists(st.tuples(TENTHS, TENTHS, TENTHS), min_size=0, max_size=40)


def columns(rows: list[tuple[float, float, float]]) -> dict[str, torch.Tensor]:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    return dict(zip(("old_logprobs", "rollout_logprobs", "advantages"), table.unbind(1)))


@pytest.mark.parametrize("loss", SCALARS)
@examples(25, rows=ROUGH, seed=st.integers(0, 100))
def test_scalars_are_the_losss_inputs_and_the_same_bits_in_any_order(loss, rows, seed):
    found = registry.call(loss.statistics, columns(rows), {})
    assert list(found) == SCALARS[loss] and set(found) <= set(registry.inputs_of(loss))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    again = registry.call(loss.statistics, {k: v[order] for k, v in columns(rows).items()}, {})
    for name, value in found.items():
        assert value.shape == () and value.dtype == torch.float64 and not value.isnan()
        assert torch.equal(value, again[name])


@pytest.mark.parametrize("loss", SCALARS)
def test_options_have_the_losss_names_and_defaults(loss):
    options = registry.options_of(loss.statistics)
    assert options.items() <= registry.options_of(loss).items()


@examples(50, rows=COLUMNS, threshold=st.sampled_from([0.04, 0.3, 1.0, 4.0]))
def test_m2po_keeps_as_many_as_the_bound_allows(rows, threshold):
    table = columns(rows)
    cut = float(registry.call(m2po.statistics, table, dict(threshold=threshold))["m2_cut"])
    squares = sorted(((table["old_logprobs"] - table["rollout_logprobs"]) ** 2).tolist())
    kept = [s for s in squares if s <= cut]
    assert not kept or sum(kept) / len(kept) <= threshold + 1e-12
    if len(kept) < len(squares):  # with the next larger value, and its equals, it is too much
        more = [s for s in squares if s <= squares[len(kept)]]
        assert sum(more) / len(more) > threshold - 1e-12


def test_m2po_drops_all_when_every_token_is_far_and_none_when_all_are_near():
    for ratio, dropped in ((10.0, 3.0), (1.0, 0.0)):
        case = one_token_each([1.0] * 3, [1.0] * 3)
        case.rollout_logprobs = case.old_logprobs - math.log(ratio)
        terms, stats = call("m2po", case)
        assert float(stats["policy/dropped_frac"][0]) == dropped
        assert (terms == 0).all() == (dropped > 0)


def test_m2po_keeps_tokens_whose_engine_logprob_is_not_finite():
    case = one_token_each([1.0] * 4, [1.0] * 4)
    case.rollout_logprobs[:] = torch.tensor([math.nan, -math.inf, -1.1, -4.0])
    assert (call("m2po", case)[0] != 0).tolist() == [True, True, True, False]


@examples(40, rows=COLUMNS, frac=st.sampled_from([0.002, 0.1, 0.5, 1.0]))
def test_kl_cov_selects_the_top_share_and_never_more(rows, frac):
    table = columns(rows)
    found = registry.call(kl_cov.statistics, table, dict(select_frac=frac))
    covariance = (table["advantages"] - found["mean_advantage"]) * (
        table["old_logprobs"] - found["mean_logprob"]
    )
    wanted = min(max(1, int(frac * len(rows))), len(rows))
    selected = covariance > found["cov_cut"]
    assert selected.sum() <= wanted
    largest = covariance.sort(descending=True).values
    if len(rows) == wanted or largest[wanted - 1] != largest[wanted]:
        assert selected.sum() == wanted


def test_kl_cov_holds_back_exactly_the_top_share_at_the_start():
    for seed in range(5):
        case = ragged(seed, drift=0.0)
        _, stats = call("kl_cov", case, select_frac=0.3)
        count = int(case.loss_mask.sum())
        assert float(stats["policy/kl_cov_frac"][0]) == max(1, int(0.3 * count))


def test_kl_cov_selects_none_where_all_advantages_are_equal():
    case = one_token_each([0.5, 1.0, 2.0], [1.0, 1.0, 1.0])
    assert float(call("kl_cov", case, select_frac=0.5)[1]["policy/kl_cov_frac"][0]) == 0


def test_clip_cov_drops_the_asked_share_at_ratio_one_and_leaves_the_rest():
    count = 20_000
    g = torch.Generator().manual_seed(0)
    case = one_token_each([1.0] * count, [0.0] * count)
    case.advantages = torch.randn(count, generator=g, dtype=torch.float64)
    case.old_logprobs = -3 * torch.rand(count, generator=g, dtype=torch.float64)
    case.logprobs = case.old_logprobs.clone().requires_grad_()
    terms, stats = call("clip_cov", case, select_frac=0.05)
    dropped = float(stats["policy/dropped_frac"][0])
    assert abs(dropped - 0.05 * count) < 5 * math.sqrt(0.05 * count)
    gradient = torch.autograd.grad(terms.sum(), case.logprobs)[0]
    assert ((gradient == 0) | (gradient == -case.advantages)).all()
    assert (gradient == 0).sum() == dropped
    scalars = statistics("clip_cov", case, {})
    covariance = (case.advantages - scalars["mean_advantage"]) * (
        case.old_logprobs - scalars["mean_logprob"]
    )
    assert ((covariance > 1) & (covariance < 5))[gradient == 0].all()


def test_clip_cov_takes_every_candidate_when_there_are_fewer_than_asked_for():
    scalars = statistics("clip_cov", ragged(0), dict(select_frac=1.0))
    assert float(scalars["select_probability"]) == 1


def test_lots_are_those_of_splitmix64_uniform_and_new_each_version():
    keys = torch.tensor([0, 1, -1, 2**62, -(2**63), 123_456_789])
    for version in (0, 1, 7, 10**9):
        expected = [lot(k % 2**64, version) for k in keys.tolist()]
        assert batchwise.draw_uniform(keys, torch.tensor(version)).tolist() == expected
    many = [batchwise.draw_uniform(torch.arange(50_000), torch.tensor(v)) for v in (3, 4)]
    for lots in many:
        counts = torch.histc(lots, bins=50, min=0, max=1)
        assert ((counts - 1000).abs() < 6 * math.sqrt(1000)).all()
    assert abs(float(torch.corrcoef(torch.stack(many))[0, 1])) < 0.02
