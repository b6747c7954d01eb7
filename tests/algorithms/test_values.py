"""The value loss against a plain loop, value and gradient, and the explained variance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.algorithms.values import explained_variance, explained_variance_sums, value_loss
from tests.helpers.built import examples
from tests.helpers.ragged import Ragged, ragged


def columns(seed: int, *, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Ragged]:
    """Draw values, old values and returns, NaN or infinite where nothing may be read."""
    base = ragged(seed)
    g = torch.Generator().manual_seed(500 + seed)
    mask = base.loss_mask
    old, returns = (torch.randn(len(mask), generator=g, dtype=torch.float64) for _ in range(2))
    values = old + 0.4 * torch.randn(len(mask), generator=g, dtype=torch.float64)
    values[mask.nonzero()[0]] = old[mask.nonzero()[0]]  # one that has not moved
    draws = dict(values=values, old_values=old, returns=returns)
    holes = dict(values=math.nan, old_values=math.inf, returns=math.nan)
    batch = {n: torch.where(mask, v, holes[n]).to(dtype) for n, v in draws.items()}
    batch["values"].requires_grad_()
    return batch | {"loss_mask": mask}, base


def loop(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """One token's term and its derivative by the value."""
    plain = (value - target) ** 2
    held = min(max(value, old - clip), old + clip) if clip else value
    if (held - target) ** 2 > plain:
        return 0.5 * (held - target) ** 2, 0.0  # held differs from value only when clipped
    return 0.5 * plain, value - target


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_value_loss_and_gradient_equal_a_plain_loop(seed, clip):
    batch, _ = columns(seed)
    terms, stats = value_loss(**batch, clip=clip)
    terms.sum().backward()
    mask, kept = batch["loss_mask"].tolist(), 0
    names = ("values", "old_values", "returns")
    clipped = 0
    for t, row in enumerate(zip(*(batch[n].tolist() for n in names))):
        term, slope = loop(*row, clip) if mask[t] else (0.0, 0.0)
        assert terms[t].item() == pytest.approx(term, abs=1e-10)
        assert batch["values"].grad[t].item() == pytest.approx(slope, abs=1e-10)
        kept += mask[t]
        clipped += bool(mask[t] and slope == 0 and row[0] != row[2])
    assert stats["value/clip_frac"][0] == clipped and stats["value/clip_frac"][1] == kept
    assert clip != 0.2 or clipped > 0
    own = [v for v, m in zip(batch["values"].tolist(), mask) if m]
    assert stats["value/mean"][0].item() == pytest.approx(math.fsum(own), abs=1e-10)


def test_float32_values_give_float32_terms_of_their_precision():
    rough, exact = columns(1, dtype=torch.float32)[0], columns(1)[0]
    terms, stats = value_loss(**rough)
    assert terms.dtype == torch.float32
    assert all(n.dtype == d.dtype == torch.float64 for n, d in stats.values())
    assert (terms - value_loss(**exact)[0]).abs().max() < 1e-5
    mixed = rough | {"returns": exact["returns"], "old_values": exact["old_values"]}
    assert value_loss(**mixed)[0].dtype == torch.float32


def test_masked_tokens_have_no_term_and_no_gradient():
    batch, base = columns(2)
    terms, _ = value_loss(**batch)
    terms.sum().backward()
    off = ~base.loss_mask
    assert (terms[off] == 0).all() and (batch["values"].grad[off] == 0).all()
    nothing = batch | {"loss_mask": torch.zeros_like(base.loss_mask)}
    terms, stats = value_loss(**nothing)
    assert (terms == 0).all() and all(n == d == 0 for n, d in stats.values())


@examples(20, seed=st.integers(0, 300), shuffle=st.randoms(use_true_random=False))
def test_packing_order_and_micro_batching_change_nothing(seed, shuffle):
    batch, base = columns(seed)
    rows = base.rows()
    shuffle.shuffle(rows)
    terms, stats = value_loss(**batch)
    added = {name: [0.0, 0.0] for name in stats}
    for part in (rows[:3], rows[3:4], rows[4:]):
        places = [t for row in part for t in row]
        got, sums = value_loss(**{n: v[places] for n, v in batch.items()})
        assert torch.equal(got, terms[places])
        for name, (numerator, denominator) in sums.items():
            added[name][0] += numerator.item()
            added[name][1] += denominator.item()
    for name, (numerator, denominator) in stats.items():
        assert added[name] == pytest.approx([numerator.item(), denominator.item()], abs=1e-10)


def test_the_clipped_loss_is_never_below_the_plain_one():
    for seed in range(6):
        batch, _ = columns(seed)
        assert (value_loss(**batch)[0] >= value_loss(**batch, clip=0.0)[0]).all()


def test_an_unmoved_value_gets_the_plain_gradient():
    values = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    terms, _ = value_loss(
        values, torch.tensor([0.5]), returns=torch.tensor([2.0]), loss_mask=torch.tensor([True])
    )
    terms.sum().backward()
    assert values.grad.item() == -1.5  # not half of it: both branches of the max are equal


def test_a_negative_clip_is_refused():
    with pytest.raises(ValueError, match="clip: must be at least 0"):
        value_loss(**columns(0)[0], clip=-0.1)


# ---------------------------------------------------------------- explained variance


def sums_of(values: list[float], returns: list[float]) -> dict:
    return explained_variance_sums(
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(returns, dtype=torch.float64),
        loss_mask=torch.ones(len(values), dtype=torch.bool),
    )


def variance(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / len(values)


@examples(
    40,
    rows=st.lists(st.tuples(st.floats(-5, 5), st.integers(-9, 9)), min_size=2, max_size=20),
    cut=st.integers(0, 20),
)
def test_explained_variance_is_exact_over_ranks(rows, cut):
    values, returns = [float(v) for v, _ in rows], [float(r) for _, r in rows]
    parts = [sums_of(values[a:b], returns[a:b]) for a, b in ((0, cut), (cut, len(rows)))]
    added = {n: tuple(x + y for x, y in zip(parts[0][n], parts[1][n])) for n in parts[0]}
    got = explained_variance(added)
    if len(set(returns)) == 1:
        assert math.isnan(got)
        return
    errors = [r - v for v, r in zip(values, returns)]
    assert got == pytest.approx(1 - variance(errors) / variance(returns), abs=1e-9)
    assert got <= 1


def test_explained_variance_of_known_cases():
    returns = [0.0, 1.0, 0.0, 1.0]
    assert explained_variance(sums_of(returns, returns)) == 1.0
    assert explained_variance(sums_of([0.3] * 4, returns)) == pytest.approx(0.0)
    assert explained_variance(sums_of([5.0, 6.0, 5.0, 6.0], returns)) == pytest.approx(1.0)  # bias
    assert explained_variance(sums_of([1.0, 0.0, 1.0, 0.0], returns)) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(sums_of([], [])))
    assert math.isnan(explained_variance(sums_of([0.0, 1.0], [0.3, 0.1 + 0.2])))


def test_the_loss_reports_how_the_old_values_explain_the_returns():
    batch, _ = columns(3)
    _, stats = value_loss(**batch)
    alone = explained_variance_sums(
        batch["old_values"], batch["returns"], loss_mask=batch["loss_mask"]
    )
    assert explained_variance(stats) == explained_variance(alone)
