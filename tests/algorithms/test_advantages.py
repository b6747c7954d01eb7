"""Each advantage against a plain loop from its paper, its invariances, and known traps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import advantages, registry
from spmdrl.algorithms.advantages import gdpo, grpo, max_rl, opo, pass_at_k, reinforce, remax, rloo
from spmdrl.credit import sequence_advantages
from spmdrl.types import Batch, Scalars
from tests.helpers.built import examples, made
from tests.helpers.ragged import mean_and_spread, scalars, scalars_of

GROUP_BASED = [n for n in advantages.__all__ if registry.needs_group(n)]
SHIFT_INVARIANT = [n for n in GROUP_BASED if n != "max_rl"]
CENTRED = ["grpo", "dr_grpo", "rloo", "lite_ppo", "max_rl", "gpg", "gdpo"]
WEIGHTS = (1.0, 0.3)


def run(name: str, batch: Scalars, **options: float) -> torch.Tensor:
    inputs = {n: v for n, v in vars(batch).items() if n in registry.INPUTS["advantage"]}
    inputs |= {"reward_parts": parts_of(batch), "greedy_rewards": greedy_of(batch)}
    return registry.call(registry.get("advantage", name), inputs, options)


def parts_of(batch: Scalars) -> torch.Tensor:
    """Two reward functions that agree on which samples differ: [S, 2]."""
    return torch.stack([batch.rewards, 2 * batch.rewards], dim=1)


def greedy_of(batch: Scalars) -> torch.Tensor:
    """A greedy reward per prompt, none for some: [S]."""
    greedy = (batch.group_ids % 4).double() / 4
    return torch.where(batch.group_ids % 5 == 4, torch.nan, greedy)


# ---------------------------------------------------------------- plain-loop references


def pstd(values: list[float]) -> float:
    return mean_and_spread(values)[1]


def reference(name: str, batch: Scalars) -> list[float]:
    rewards, valid = batch.rewards.tolist(), batch.is_valid.tolist()
    groups, lengths = batch.group_ids.tolist(), batch.response_lengths.tolist()
    everyone = [i for i in range(len(rewards)) if valid[i]]
    if name == "reinforce":
        return [rewards[i] if valid[i] else 0.0 for i in range(len(rewards))]
    if name == "remax":
        greedy = greedy_of(batch).tolist()
        return [
            rewards[i] - greedy[i] if valid[i] and not math.isnan(greedy[i]) else 0.0
            for i in range(len(rewards))
        ]
    if name == "gdpo":
        return gdpo_loop(batch, [rewards, [2 * r for r in rewards]], weights=(1.0, 2.0))
    members = {g: [i for i in everyone if groups[i] == g] for g in set(groups)}
    usable = {g: m for g, m in members.items() if len(m) >= 2}
    varied = {g: m for g, m in usable.items() if len({rewards[i] for i in m}) > 1}
    out = [0.0] * len(rewards)
    for m in varied.values():
        own = [rewards[i] for i in m]
        mean = math.fsum(own) / len(own)
        for i in m:
            others = [rewards[j] for j in m if j != i]
            weight = sum(lengths[j] for j in m)
            out[i] = {
                "grpo": lambda: (rewards[i] - mean) / (pstd(own) + 1e-6),
                "dr_grpo": lambda: rewards[i] - mean,
                "rloo": lambda: rewards[i] - math.fsum(others) / len(others),
                "lite_ppo": lambda: (
                    (rewards[i] - mean) / (pstd([rewards[j] for j in everyone]) + 1e-6)
                ),
                "max_rl": lambda: (rewards[i] - mean) / (mean + 1e-6),
                "gpg": lambda: (
                    (rewards[i] - mean) * len(everyone) / sum(len(v) for v in varied.values())
                ),
                "opo": lambda: rewards[i] - math.fsum(lengths[j] * rewards[j] for j in m) / weight,
                "pass_at_k": lambda: max(0.0, rewards[i] - max(others)),
                "reinforce_plus_plus_baseline": lambda: rewards[i] - mean,
            }[name]()
    if name == "reinforce_plus_plus_baseline":
        counted = [i for m in usable.values() for i in m]
        tokens = [out[i] for i in counted for _ in range(lengths[i])]
        mean, std = mean_and_spread(tokens)
        for i in counted:
            out[i] = (out[i] - mean) / (std + 1e-8)
    return out


def gdpo_loop(
    batch: Scalars, columns: list[list[float]], *, weights: tuple[float, float]
) -> list[float]:
    valid, groups = batch.is_valid.tolist(), batch.group_ids.tolist()
    out, counted = [0.0] * len(batch), []
    for group in set(groups):
        members = [i for i in range(len(batch)) if valid[i] and groups[i] == group]
        counted += members if len(members) >= 2 else []
        for weight, column in zip(weights, columns):
            own = [column[i] for i in members]
            if len(set(own)) > 1:
                for i in members:
                    out[i] += weight * (column[i] - math.fsum(own) / len(own)) / pstd(own)
    std = pstd([out[i] for i in counted])
    return [a / (std + 1e-6) for a in out]


@pytest.mark.parametrize("name", advantages.__all__)
@pytest.mark.parametrize("seed", range(8))
def test_advantage_equals_a_plain_loop(name, seed):
    batch = scalars(seed)
    if seed == 7:  # no response of a group has a token: any finite baseline will do
        lengths = batch.response_lengths.clone()
        lengths[5:8] = 0
        batch = dataclasses.replace(batch, response_lengths=lengths)
        if name == "opo":
            assert run(name, batch).isfinite().all()
            return
    got = run(name, batch, **({"part_weights": (1.0, 2.0)} if name == "gdpo" else {}))
    assert got.dtype == torch.float64
    expected = torch.tensor(reference(name, batch), dtype=torch.float64)
    assert (got - expected).abs().max() < 1e-10
    assert (got[~batch.is_valid] == 0).all()


# ---------------------------------------------------------------- properties

groups_of_rewards = st.lists(
    st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


def batch_of(groups: list[list[float]]) -> Scalars:
    ids = [i for i, g in enumerate(groups) for _ in g]
    lengths = torch.arange(len(ids)) % 5 + 3
    return scalars_of([r for g in groups for r in g], ids, response_lengths=lengths)


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@examples(25, groups=groups_of_rewards, constant=st.floats(-100, 100))
def test_a_constant_added_to_the_rewards_changes_nothing(name, groups, constant):
    batch = batch_of(groups)
    moved = dataclasses.replace(batch, rewards=batch.rewards + constant)
    assert torch.allclose(run(name, batch), run(name, moved), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", advantages.__all__)
@examples(25, groups=groups_of_rewards, seed=st.integers(0, 1000))
def test_permuting_sequences_permutes_advantages(name, groups, seed):
    if name == "max_rl":
        groups = [[abs(r) for r in g] for g in groups]
    batch = batch_of(groups)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    mixed = Scalars(**{k: v[order] for k, v in vars(batch).items()})
    assert torch.allclose(run(name, batch)[order], run(name, mixed), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", GROUP_BASED)
@examples(25, rewards=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_groups_of_one_get_zero_and_do_not_touch_others(name, rewards):
    assert (run(name, batch_of([[r] for r in rewards])) == 0).all()
    others = run(name, batch_of([[0.0, 1.0]]))
    if name not in ("lite_ppo", "gpg"):  # those two scale by the whole batch
        both = run(name, batch_of([[0.0, 1.0], *[[r] for r in rewards]]))
        assert torch.allclose(both[:2], others) and (both[2:] == 0).all()


@pytest.mark.parametrize("name", GROUP_BASED)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6, 0.1 + 0.2])
def test_equal_rewards_give_exactly_zero(name, value):
    assert (run(name, batch_of([[value] * 7, [value] * 3])) == 0).all()
    almost = [value] * 7 + [value * (1 + 4e-16)]
    assert (run(name, batch_of([almost])) == 0).all()


@pytest.mark.parametrize("name", CENTRED)
@examples(25, groups=groups_of_rewards)
def test_advantages_of_a_group_add_up_to_zero(name, groups):
    batch = batch_of([[abs(r) for r in g] for g in groups])
    got = run(name, batch)
    sums = torch.zeros(len(groups), dtype=torch.float64).index_add(0, batch.group_ids, got)
    assert (sums.abs() <= 1e-9 * (1 + got.abs().max())).all()


@examples(25, groups=groups_of_rewards)
def test_advantages_are_bounded(groups):
    batch = batch_of(groups)
    sizes = torch.tensor([len(g) for g in groups for _ in g], dtype=torch.float64)
    assert (run("grpo", batch).abs() <= (sizes - 1).sqrt() + 1e-9).all()
    lead = run("pass_at_k", batch)
    spans = torch.tensor([max(g) - min(g) for g in groups for _ in g], dtype=torch.float64)
    assert ((lead >= 0) & (lead <= spans)).all()
    assert run("gdpo", batch).square().mean() <= 1 + 1e-9


@examples(
    25,
    rows=st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=7),
    constants=st.tuples(st.floats(-50, 50), st.floats(-50, 50)),
    factors=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
)
def test_gdpo_ignores_the_offset_and_unit_of_each_reward_function(rows, constants, factors):
    parts = torch.tensor(rows, dtype=torch.float64) / 4
    batch = batch_of([[0.0] * len(rows)])
    args = dict(group_ids=batch.group_ids, is_valid=batch.is_valid, part_weights=WEIGHTS)
    moved = parts * torch.tensor(factors, dtype=torch.float64) + torch.tensor(constants).double()
    assert torch.allclose(gdpo(parts, **args), gdpo(moved, **args), rtol=1e-8, atol=1e-8)


# ---------------------------------------------------------------- more than one reward


@pytest.mark.parametrize("seed", range(6))
def test_gdpo_equals_a_plain_loop(seed):
    batch = scalars(seed)
    g = torch.Generator().manual_seed(seed)
    second = torch.rand(len(batch), generator=g, dtype=torch.float64).round(decimals=1)
    columns = [batch.rewards.tolist(), second.tolist()]
    got = gdpo(
        torch.tensor(columns, dtype=torch.float64).T,
        batch.group_ids,
        is_valid=batch.is_valid,
        part_weights=WEIGHTS,
    )
    expected = torch.tensor(gdpo_loop(batch, columns, weights=WEIGHTS), dtype=torch.float64)
    assert (got - expected).abs().max() < 1e-10


def test_gdpo_tells_apart_what_one_sum_of_rewards_confuses():
    parts = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    batch = batch_of([[0.0] * 4])
    got = gdpo(parts, batch.group_ids, is_valid=batch.is_valid)
    assert got[1] != got[2]  # both rewards add up to 1
    assert got[2] == got[3]


def test_gdpo_does_not_blow_up_parts_that_cancel_out():
    first = torch.tensor([0.1, 0.7, 0.3, 0.9], dtype=torch.float64)
    batch = batch_of([[0.0] * 4])
    for factor in (1.0, 1 / 3, 7.0):
        parts = torch.stack([first, 0.3 - factor * first], dim=1)
        assert (gdpo(parts, batch.group_ids, is_valid=batch.is_valid) == 0).all()


def test_gdpo_refuses_a_wrong_number_of_weights():
    batch = batch_of([[1.0, 0.0]])
    with pytest.raises(ValueError, match="3 weights for 2 reward functions"):
        gdpo(parts_of(batch), batch.group_ids, is_valid=batch.is_valid, part_weights=[1, 2, 3])


# ---------------------------------------------------------------- pass at k, greedy baseline


def test_pass_at_k_credits_the_best_sample_by_its_lead():
    batch = batch_of([[0.2, 1.0, 0.7], [0.5, 0.5, 0.1], [0.9]])
    assert run("pass_at_k", batch).tolist() == [0.0, pytest.approx(0.3), 0.0] + [0.0] * 4
    scaled = pass_at_k(batch.rewards, batch.group_ids, is_valid=batch.is_valid, scale="std")
    assert scaled[1].item() == pytest.approx(0.3 / (pstd([0.2, 1.0, 0.7]) + 1e-6))


def test_pass_at_k_takes_a_lead_at_rounding_level_for_a_tie():
    assert (run("pass_at_k", batch_of([[0.3, 0.1 + 0.2, 0.0]])) == 0).all()


def test_pass_at_k_looks_at_valid_samples_alone():
    batch = scalars_of([-1.0, -3.0, 9.0], is_valid=[True, True, False])
    assert run("pass_at_k", batch).tolist() == [2.0, 0.0, 0.0]


def test_remax_gives_zero_without_a_greedy_sample_and_for_an_equal_one():
    rewards = torch.tensor([1.0, 1.0, 0.3, float("nan")], dtype=torch.float64)
    greedy = torch.tensor([0.25, float("nan"), 0.1 + 0.2, 0.5], dtype=torch.float64)
    got = remax(rewards, greedy, is_valid=torch.tensor([True, True, True, False]))
    assert got.tolist() == [0.75, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="is inf"):
        remax(rewards[:1], torch.tensor([math.inf]), is_valid=torch.tensor([True]))


@pytest.mark.parametrize("name", advantages.__all__)
def test_float32_rewards_give_the_same_up_to_their_precision(name):
    batch = scalars(2)
    rough = dataclasses.replace(batch, rewards=batch.rewards.float())
    got = run(name, rough)
    assert got.dtype == torch.float64
    assert (got - run(name, batch)).abs().max() < 1e-5


@pytest.mark.parametrize("name", advantages.__all__)
def test_a_batch_without_sequences_has_no_advantages(name):
    batch = scalars(0)
    empty = Scalars(**{k: v[:0] for k, v in vars(batch).items()})
    assert run(name, empty).shape == (0,)


# ---------------------------------------------------------------- traps


def test_one_success_in_sixteen_stands_out_by_the_full_groups_spread():
    advantages = run("grpo", batch_of([[1.0] + [0.0] * 15]))
    assert advantages[0].item() == pytest.approx(math.sqrt(15), rel=1e-4)  # not +1.0
    assert advantages[1].item() == pytest.approx(-1 / math.sqrt(15), rel=1e-4)


def test_a_winner_among_equal_losers_is_not_blown_up_by_rounding():
    advantages = run("grpo", batch_of([[1.0] + [-0.7] * 7]))
    assert advantages.abs().max().item() == pytest.approx(math.sqrt(7), rel=1e-4)  # not 5247


def test_samples_that_are_not_valid_enter_no_statistic():
    rewards, is_valid = [1.0, 0.0, math.nan, 1.0, 0.0], [True, True, False, True, True]
    batch = scalars_of(rewards, [1, 1, 1, 5, 5], is_valid=is_valid)
    for name in advantages.__all__:
        got = run(name, batch)
        assert got[2] == 0 and torch.allclose(got[:2], got[3:])


def test_a_group_left_with_one_valid_sample_gets_zero():
    batch = scalars_of([1.0, 0.0], is_valid=[True, False])
    for name in GROUP_BASED:
        assert (run(name, batch) == 0).all()


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match=r"sequence 1 \(group 0\) is nan"):
        run("grpo", batch_of([[1.0, float("nan")]]))


def test_max_rl_refuses_negative_rewards():
    batch = batch_of([[-1.0, 1.0]])
    with pytest.raises(ValueError, match="rewards of at least 0, got -1.0"):
        max_rl(batch.rewards, batch.group_ids, is_valid=batch.is_valid)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        grpo(torch.ones(2), torch.zeros(3).long(), is_valid=torch.ones(2).bool())


def test_rloo_and_opo_have_zero_mean_in_their_own_measure():
    batch = batch_of([[0.2, 0.9, 0.4, 0.1]])
    args = dict(is_valid=batch.is_valid)
    assert rloo(batch.rewards, batch.group_ids, **args).sum().abs() < 1e-12
    weighted = opo(batch.rewards, batch.group_ids, response_lengths=batch.response_lengths, **args)
    assert (weighted * batch.response_lengths).sum().abs() < 1e-12


def test_advantages_of_a_batch_follow_the_config():
    batch = Batch(scalars_of([1.0, 0.0]), updates=(), update_ids=torch.zeros(2, dtype=torch.int64))
    rl = made(algorithm=dict(advantage="dr_grpo"))
    assert sequence_advantages(batch, cfg=rl).tolist() == [0.5, -0.5]
    own = made(algorithm=dict(advantage=f"{__name__}:of_the_wrong_shape"))
    with pytest.raises(ValueError, match=r"gave shape \(1,\)"):
        sequence_advantages(batch, cfg=own)


def of_the_wrong_shape(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[:1]


def test_plain_reinforce_keeps_the_reward():
    got = reinforce(torch.tensor([0.3, 2.0]), is_valid=torch.tensor([True, False]))
    assert got.tolist() == [pytest.approx(0.3), 0.0]
