"""Each per-token advantage against a plain loop, its invariances, and known traps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.algorithms import token_advantages, token_baselines
from spmdrl.algorithms.advantages import dr_grpo, grpo, rloo
from spmdrl.algorithms.loss_tokens import discounted_sums, loss_tokens
from spmdrl.algorithms.token_advantages import (
    combine_moments,
    distill,
    gae,
    gigpo,
    mean_and_std,
    moment_sums,
    otb,
    prime,
    reinforce_plus_plus,
    whiten,
)
from tests.helpers.built import examples
from tests.helpers.ragged import mean_and_spread, packed, ragged

Columns = dict[str, Tensor]
SEEDS = range(6)
ONE_GROUP = dict(group_ids=torch.zeros(2).long(), is_valid=torch.ones(2).bool())
LOGPROBS = ("old_logprobs", "teacher_logprobs", "prm_logprobs", "ref_logprobs")
TOKEN_COLUMNS = ("values", "kl_rewards", *LOGPROBS, "square_probs")


def columns(seed: int, *, dtype: torch.dtype = torch.float64) -> Columns:
    """Draw a micro-batch with every input, and NaN wherever nothing may be read."""
    base = ragged(seed)
    g = torch.Generator().manual_seed(1000 + seed)
    mask, cu = base.loss_mask, base.cu_seqlens
    num_tokens, num_sequences = len(mask), len(cu) - 1
    out = {
        name: torch.randn(num_tokens, generator=g, dtype=torch.float64) for name in TOKEN_COLUMNS
    }
    for name in LOGPROBS:
        out[name] = -out[name].abs() - 0.01
    probs = out["old_logprobs"].exp()
    out["square_probs"] = probs**2 + (1 - probs) ** 2 * torch.rand(num_tokens, generator=g)
    out = {n: torch.where(mask, v, torch.nan).to(dtype) for n, v in out.items()}
    out["step_table"] = torch.randn(num_sequences, num_tokens, generator=g, dtype=torch.float64)
    for name in ("rewards", "episode_advantages", "process_baselines"):
        out[name] = torch.randn(num_sequences, generator=g, dtype=torch.float64)
    out["process_baselines"][3] = torch.nan
    has_tokens = [bool(mask[a:b].any()) for a, b in zip(cu.tolist(), cu.tolist()[1:])]
    out["rewards"][~torch.tensor(has_tokens)] = torch.nan  # without loss tokens: never read
    out["group_ids"] = torch.tensor([0, 0, 1] + [2 + i // 3 for i in range(num_sequences - 3)])
    return out | {"loss_mask": mask, "cu_seqlens": cu}


def responses(batch: Columns) -> list[list[int]]:
    """Packed positions of each sequence's loss tokens."""
    cu, mask = batch["cu_seqlens"].tolist(), batch["loss_mask"].tolist()
    return [[t for t in range(a, b) if mask[t]] for a, b in zip(cu, cu[1:])]


def pick(batch: Columns, *names: str) -> Columns:
    return {name: batch[name] for name in ("loss_mask", "cu_seqlens", *names)}


def implicit_means(batch: Columns, **options: float) -> Tensor:
    """Each sequence's mean process reward, of a micro-batch that is the whole batch."""
    count = len(batch["cu_seqlens"]) - 1
    whole = dict(sequence_ids=torch.arange(count), num_sequences=count)
    named = pick(batch, "prm_logprobs", "ref_logprobs")
    return token_baselines.prime_totals(**named, **whole, **options)["implicit_means"]


def otb_totals(batch: Columns, of: Columns | None = None) -> Tensor:
    """The totals of a micro-batch, with places for all of the batch that it is of."""
    names, of = ("old_logprobs", "square_probs", "kl_rewards", "group_ids", "rewards"), of or batch
    return token_baselines.otb_totals(
        **pick(batch, *names),
        num_groups=int(of["group_ids"].max()) + 1,
        num_positions=of["loss_mask"].numel(),
    )["otb_totals"]


PRIME = ("prm_logprobs", "ref_logprobs", "process_baselines", "episode_advantages", "rewards")
METHODS = {
    "gae": lambda b: gae(
        **pick(b, "rewards", "values", "kl_rewards"), gamma=0.9, lam=0.8, value_lam=0.95
    ),
    "gae_adaptive": lambda b: gae(**pick(b, "rewards", "values", "kl_rewards"), length_alpha=0.5),
    "reinforce_plus_plus": lambda b: reinforce_plus_plus(**pick(b, "rewards", "kl_rewards")),
    "distill": lambda b: distill(**pick(b, "old_logprobs", "teacher_logprobs"), max_gap=1.5),
    "prime": lambda b: prime(**pick(b, *PRIME), gamma=0.9),
    "gigpo": lambda b: gigpo(**pick(b, "episode_advantages", "step_table"), step_weight=0.7),
    "otb": lambda b: otb(**pick(b, "rewards", "group_ids", "kl_rewards", "otb_totals")),
}


def everything(seed: int, **options: torch.dtype) -> Columns:
    batch = columns(seed, **options)
    return batch | {"otb_totals": otb_totals(batch)}


# ---------------------------------------------------------------- plain-loop references


def at(batch: Columns, name: str) -> list[float]:
    return batch[name].double().tolist()


def gae_loop(
    batch: Columns, row: int, tokens: list[int], *, gamma: float, lam: float
) -> list[float]:
    values, kl = at(batch, "values"), at(batch, "kl_rewards")
    out, ahead, next_value = [], 0.0, 0.0
    for t in reversed(tokens):
        reward = kl[t] + (at(batch, "rewards")[row] if t == tokens[-1] else 0.0)
        ahead = reward + gamma * next_value - values[t] + gamma * lam * ahead
        next_value = values[t]
        out.append(ahead)
    return out[::-1]


def earned(batch: Columns, row: int, tokens: list[int]) -> list[float]:
    kl = at(batch, "kl_rewards")
    return [at(batch, "rewards")[row] + math.fsum(kl[u] for u in tokens if u >= t) for t in tokens]


def otb_loop(batch: Columns, row: int) -> list[float]:
    """The baseline at position n from all samples of the prompt that reach it."""
    probs, squares = at(batch, "old_logprobs"), at(batch, "square_probs")
    groups, rows, out = batch["group_ids"].tolist(), responses(batch), []
    for n in range(len(rows[row])):
        total = weighted = 0.0
        others = [i for i in range(len(rows)) if groups[i] == groups[row] and len(rows[i]) > n]
        for i in others:
            energy = math.fsum(1 - 2 * math.exp(probs[t]) + squares[t] for t in rows[i][: n + 1])
            total += energy
            weighted += energy * earned(batch, i, rows[i])[n]
        own = earned(batch, row, rows[row])[n]
        out.append(own - weighted / total if len(others) > 1 else 0.0)
    return out


def reference(name: str, batch: Columns, row: int, tokens: list[int]) -> list[float]:
    n = len(tokens)
    if name == "gae":
        return gae_loop(batch, row, tokens, gamma=0.9, lam=0.8)
    if name == "gae_adaptive":
        return gae_loop(batch, row, tokens, gamma=1.0, lam=max(0.0, 1 - 1 / (0.5 * max(n, 1))))
    if name == "reinforce_plus_plus":
        return earned(batch, row, tokens)
    if name == "distill":
        gaps = [at(batch, "teacher_logprobs")[t] - at(batch, "old_logprobs")[t] for t in tokens]
        return [min(max(gap, -1.5), 1.5) for gap in gaps]
    if name == "gigpo":
        runs = [sum(b - a > 1 for a, b in zip(tokens[:i], tokens[1 : i + 1])) for i in range(n)]
        return [
            at(batch, "episode_advantages")[row] + 0.7 * at(batch, "step_table")[row][run]
            for run in runs
        ]
    if name == "otb":
        return otb_loop(batch, row)
    base = at(batch, "process_baselines")[row]
    own = [
        0.05 * (at(batch, "prm_logprobs")[t] - at(batch, "ref_logprobs")[t]) - base for t in tokens
    ]
    own = [0.0] * n if math.isnan(base) else own
    return [
        at(batch, "episode_advantages")[row]
        + math.fsum(0.9 ** (j - i) * own[j] for j in range(i, n))
        for i in range(n)
    ]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", SEEDS)
def test_token_advantage_equals_a_plain_loop(name, seed):
    batch = everything(seed)
    got, returns = METHODS[name](batch)
    assert got.dtype == torch.float64 and got.shape == batch["loss_mask"].shape
    assert (returns is None) == (not name.startswith(("gae", "prime")))
    loops = [reference(name, batch, row, tokens) for row, tokens in enumerate(responses(batch))]
    expected = torch.tensor([a for loop in loops for a in loop], dtype=torch.float64)
    assert (got[batch["loss_mask"]] - expected).abs().max() < 1e-10
    assert (got[~batch["loss_mask"]] == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_returns_of_gae_have_their_own_lambda(seed):
    batch = columns(seed)
    _, returns = METHODS["gae"](batch)
    for row, tokens in enumerate(responses(batch)):
        loop = gae_loop(batch, row, tokens, gamma=0.9, lam=0.95)
        for t, advantage in zip(tokens, loop):
            assert returns[t].item() == pytest.approx(
                batch["values"][t].item() + advantage, abs=1e-10
            )
    assert (returns[~batch["loss_mask"]] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_float32_inputs_give_the_same_up_to_their_precision(name):
    rough, exact = everything(1, dtype=torch.float32), everything(1)
    got = METHODS[name](rough | {"otb_totals": exact["otb_totals"]})[0]
    assert got.dtype == torch.float64
    assert (got - METHODS[name](exact)[0]).abs().max() < 1e-5


# ---------------------------------------------------------------- properties


def select(batch: Columns, order: list[int]) -> Columns:
    """The micro-batch of these sequences in this order; whole-batch parts stay as they are."""
    cu = batch["cu_seqlens"].tolist()
    tokens = [t for row in order for t in range(cu[row], cu[row + 1])]
    lengths = torch.tensor([0] + [cu[row + 1] - cu[row] for row in order])
    by_row = ("rewards", "episode_advantages", "process_baselines", "group_ids", "step_table")
    out = {
        n: v[order] if n in by_row else v[tokens]
        for n, v in batch.items()
        if n not in ("cu_seqlens", "otb_totals")
    }
    out["cu_seqlens"] = lengths.cumsum(0).int()
    return out | {n: v for n, v in batch.items() if n == "otb_totals"}


@pytest.mark.parametrize("name", METHODS)
@examples(
    12,
    seed=st.integers(0, 500),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    shuffle=st.randoms(use_true_random=False),
)
def test_packing_order_and_micro_batching_change_nothing(name, seed, cuts, shuffle):
    batch = everything(seed)
    whole = METHODS[name](batch)
    cu = batch["cu_seqlens"].tolist()
    order = list(range(len(cu) - 1))
    shuffle.shuffle(order)
    edges = [0, *sorted(cuts), len(order)]
    for rows in (order[a:b] for a, b in zip(edges, edges[1:])):
        parts = METHODS[name](select(batch, rows))
        places = [t for row in rows for t in range(cu[row], cu[row + 1])]
        for part, full in zip(parts, whole):
            assert (part is None) == (full is None)
            assert part is None or torch.allclose(part, full[places], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [m for m in METHODS if m != "gigpo"])  # holes part its turns
def test_holes_in_a_response_are_stepped_over(name):
    batch = everything(2)
    kept = batch["loss_mask"]
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), kept.long().cumsum(0)])
    dense = {n: v[kept] if v.shape[:1] == kept.shape else v for n, v in batch.items()}
    dense["cu_seqlens"] = cu[batch["cu_seqlens"].long()].int()
    assert torch.allclose(METHODS[name](dense)[0], METHODS[name](batch)[0][kept], atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_micro_batch_without_loss_tokens_has_no_advantages(name):
    batch = everything(0)
    for rows in ([], [0], [1], [0, 1]):  # none, empty, masked whole
        part = select(batch, rows)
        got = METHODS[name](part)[0]
        assert got.shape == part["loss_mask"].shape and (got == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_advantages_carry_no_gradient(name):
    batch = everything(0)
    batch = {
        n: v.clone().requires_grad_() if v.is_floating_point() and n in TOKEN_COLUMNS else v
        for n, v in batch.items()
    }
    assert not any(r.requires_grad for r in METHODS[name](batch) if r is not None)


@examples(15, seed=st.integers(0, 200), gap=st.floats(0.01, 5))
def test_distillation_is_bounded(seed, gap):
    batch = columns(seed)
    got, _ = distill(**pick(batch, "old_logprobs", "teacher_logprobs"), max_gap=gap)
    assert (got.abs() <= gap).all()


@examples(
    40,
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    discount=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    seed=st.integers(0, 99),
)
def test_discounted_sums_equal_the_recursion(counts, discount, seed):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(counts), generator=g, dtype=torch.float64)
    last = torch.tensor(
        [sum(counts[: i + 1]) - 1 for i, n in enumerate(counts) for _ in range(n)],
        dtype=torch.int64,
    )
    got = discounted_sums(values, discounts=discount, last=last)
    expected = values.tolist()
    for t in reversed(range(len(expected))):
        if t < last[t]:
            expected[t] += discount * expected[t + 1]
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


# ---------------------------------------------------------------- parts from the whole batch


@pytest.mark.parametrize("seed", SEEDS)
def test_process_baselines_equal_a_plain_loop(seed):
    batch = columns(seed)
    names = ("prm_logprobs", "ref_logprobs")
    means = implicit_means(batch, beta=0.2)
    rows = responses(batch)
    own = [
        math.fsum(0.2 * (at(batch, names[0])[t] - at(batch, names[1])[t]) for t in row)
        / max(len(row), 1)
        for row in rows
    ]
    assert torch.allclose(means, torch.tensor(own, dtype=torch.float64), atol=1e-12)
    is_valid = torch.tensor([bool(row) for row in rows])
    got = token_baselines.leave_one_out_means(means, batch["group_ids"], is_valid=is_valid)
    groups = batch["group_ids"].tolist()
    for i in range(len(rows)):
        others = [own[j] for j in range(len(rows)) if rows[j] and groups[j] == groups[i] and j != i]
        if rows[i] and others:
            assert got[i].item() == pytest.approx(math.fsum(others) / len(others), abs=1e-12)
        else:
            assert got[i].isnan()


@pytest.mark.parametrize("seed", SEEDS)
def test_process_rewards_come_to_the_rows_of_the_batch(seed):
    batch = columns(seed)
    names, count = ("prm_logprobs", "ref_logprobs"), len(batch["cu_seqlens"]) - 1
    means = implicit_means(batch)
    total = 0.0
    for rows in ([4, 0, 7], [2, 3], [1], [6, 5]):
        ids = torch.tensor([row if responses(batch)[row] else -1 for row in rows])
        part = pick(select(batch, rows), *names) | dict(sequence_ids=ids, num_sequences=count)
        total = total + token_baselines.prime_totals(**part)["implicit_means"]
    assert torch.allclose(total, means, atol=1e-12)
    lengths = torch.tensor([len(row) for row in responses(batch)])
    is_valid = torch.arange(count) != 5
    rewards = torch.where(is_valid, torch.linspace(0, 1, count).double(), 7.0)
    given = dict(group_ids=batch["group_ids"], is_valid=is_valid)
    got = token_baselines.prime_baselines(means, rewards, loss_lengths=lengths, **given)
    assert torch.equal(got["episode_advantages"], rloo(rewards, **given))
    expected = token_baselines.leave_one_out_means(
        means, batch["group_ids"], is_valid=is_valid & (lengths > 0)
    )
    torch.testing.assert_close(got["process_baselines"], expected, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5 \(sequence 2, group 1\)"):
        token_baselines.prime_baselines(
            means, rewards.index_fill(0, torch.tensor(2), 1.5), loss_lengths=lengths, **given
        )


@examples(25, rewards=st.lists(st.floats(-3, 3), min_size=2, max_size=6))
def test_leave_one_out_means_rebuild_the_group_mean(rewards):
    values = torch.tensor(rewards, dtype=torch.float64)
    groups, is_valid = torch.zeros(len(values)).long(), torch.ones(len(values)).bool()
    got = token_baselines.leave_one_out_means(values, groups, is_valid=is_valid)
    assert torch.allclose(got * (len(values) - 1) + values, values.sum(), atol=1e-9)


def centred(value: float, others: list[float], scale: str) -> tuple[float, float]:
    """A value less the mean of all of its kind, over their spread where that is asked for."""
    mean, spread = mean_and_spread(others)
    return (value - mean) / (spread + 1e-6 if scale == "std" else 1.0), spread


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("seed", SEEDS)
def test_gigpo_steps_equal_a_plain_loop(seed, scale):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.rand(9, generator=g, dtype=torch.float64).round(decimals=1)
    groups, is_valid = torch.arange(9) // 3, torch.arange(9) != 4
    turns = torch.zeros(9, 4, 2, dtype=torch.float64)
    turns[..., 0] = torch.rand(9, 4, generator=g, dtype=torch.float64).round(decimals=1)
    turns[..., 1] = torch.randint(-1, 3, (9, 4), generator=g)
    counts = [int(n) for n in torch.randint(1, 5, (9,), generator=g)]
    for row, count in enumerate(counts):
        turns[row, count:] = torch.tensor([0.0, token_baselines.NO_TURN])
    got = token_baselines.gigpo_steps(
        turns, rewards, group_ids=groups, is_valid=is_valid, gamma=0.9, scale=scale
    )
    returns: dict[tuple[int, int], float] = {}
    for row, count in enumerate(counts):
        own, ahead = turns[row, :count, 0].tolist(), 0.0
        own[-1] += rewards[row].item() - math.fsum(own)
        for k in reversed(range(count)):
            returns[row, k] = ahead = own[k] + 0.9 * ahead
    for row, k in ((i, j) for i in range(9) for j in range(4)):
        state = turns[row, k, 1].item()
        same = [
            returns[i, j]
            for i, j in returns
            if is_valid[i] and groups[i] == groups[row] and turns[i, j, 1].item() == state
        ]
        if not is_valid[row] or state < 0 or len(same) == 1:
            assert got["step_table"][row, k] == 0
            continue
        expected, spread = centred(returns[row, k], same, scale)
        if spread > 1e-9:
            assert got["step_table"][row, k].item() == pytest.approx(expected, abs=1e-9)
    episode = grpo if scale == "std" else dr_grpo
    assert torch.equal(got["episode_advantages"], episode(rewards, groups, is_valid=is_valid))


def test_gigpo_without_a_single_state_is_refused():
    turns = torch.tensor([[[0.0, -1.0]], [[0.0, -1.0]]], dtype=torch.float64)
    with pytest.raises(ValueError, match="no turn has one; give rollout.environment a method"):
        token_baselines.gigpo_steps(turns, torch.tensor([1.0, 0.0]), **ONE_GROUP)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("seed", SEEDS)
def test_step_advantages_equal_a_plain_loop(seed, scale):
    g = torch.Generator().manual_seed(seed)
    returns = torch.rand(30, generator=g, dtype=torch.float64).round(decimals=1)
    groups = torch.randint(0, 3, (30,), generator=g)
    anchors = torch.randint(-1, 4, (30,), generator=g)
    got = token_baselines.step_advantages(
        returns, group_ids=groups, anchor_ids=anchors, scale=scale
    )
    key = list(zip(groups.tolist(), anchors.tolist()))
    for i in range(30):
        same = [returns[j].item() for j in range(30) if key[j] == key[i]]
        expected, _ = centred(returns[i].item(), same, scale)
        if key[i][1] < 0 or len(set(same)) == 1:
            assert got[i] == 0
        else:
            assert got[i].item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_the_token_baseline_add_up_over_micro_batches(seed):
    batch = columns(seed)
    rows = ([4, 0, 7], [2, 3], [1], [6, 5])
    parts = [otb_totals(select(batch, part), batch) for part in rows]
    assert torch.allclose(sum(parts), otb_totals(batch), atol=1e-12)


def test_gigpo_from_turns_to_tokens():
    # Two episodes of a prompt meet state 7 first; then 8 and 9, seen once each.
    mask = torch.tensor([True, True, False, True, True, False, True])
    batch = dict(loss_mask=mask, cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32))
    turns = torch.tensor([[[0.0, 7], [0.0, 8]], [[0.0, 7], [0.0, 9]]], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = token_baselines.gigpo_steps(turns, rewards, gamma=0.5, scale="none", **ONE_GROUP)
    assert found["step_table"].tolist() == [[0.25, 0.0], [-0.25, 0.0]]
    got, _ = gigpo(**found, step_weight=2.0, **batch)
    assert got.tolist() == [1.0, 1.0, 0.0, 0.5, -1.0, 0.0, -0.5]


# ---------------------------------------------------------------- whitening


def moments_of_pieces(advantages: Tensor, mask: Tensor, edges: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and spread, merged from those of the pieces between the edges."""
    pieces = zip(edges, edges[1:])
    parts = [moment_sums(advantages[a:b], loss_mask=mask[a:b]) for a, b in pieces]
    return mean_and_std(combine_moments(torch.stack(parts)))


@examples(
    30,
    seed=st.integers(0, 300),
    shift=st.sampled_from([0.0, 1e3, -1e6]),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_whitening_by_merged_moments_equals_whitening_in_one_piece(seed, shift, cuts):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(12, generator=g) < 0.7
    mask[0] = mask[5] = True
    advantages = torch.where(mask, shift + torch.randn(12, generator=g).double(), torch.nan)
    mean, std = moments_of_pieces(advantages, mask, [0, *sorted(cuts), 12])
    kept = [a - shift for a in advantages[mask].tolist()]
    exact, spread = mean_and_spread(kept)
    assert mean.item() == pytest.approx(exact + shift, abs=1e-9)
    assert std.item() == pytest.approx(spread, rel=1e-8)
    got = whiten(advantages, loss_mask=mask, mean=mean, std=std)
    expected = [(a - exact) / (spread + 1e-8) for a in kept]
    assert got[mask].tolist() == pytest.approx(expected, abs=1e-8 * (1 + abs(shift) / 1e3))
    assert (got[~mask] == 0).all()
    assert abs(got.sum().item()) < 1e-6 and got.square().sum().item() == pytest.approx(len(kept))


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e6])
def test_tokens_of_one_value_are_whitened_to_zero(value):
    mask = torch.ones(7, dtype=torch.bool)
    advantages = torch.full((7,), value, dtype=torch.float64)
    advantages[3] *= 1 + 4e-16
    mean, std = moments_of_pieces(advantages, mask, [0, 3, 7])
    assert (whiten(advantages, loss_mask=mask, mean=mean, std=std) == 0).all()


def test_moments_without_tokens_are_zero():
    nothing = moment_sums(torch.full((3,), torch.nan), loss_mask=torch.zeros(3, dtype=torch.bool))
    assert nothing.tolist() == [0.0, 0.0, 0.0]
    assert combine_moments(nothing.expand(2, 3)).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="eps: must be above 0"):
        one = torch.ones(1)
        whiten(one, loss_mask=one.bool(), mean=one[0], std=one[0], eps=0.0)


def test_methods_that_need_whitening_say_so():
    methods = {n: getattr(token_advantages, n) for n in token_advantages.__all__}
    assert [n for n, method in methods.items() if getattr(method, "is_whitened", False)] == [
        "gae",
        "reinforce_plus_plus",
    ]


# ---------------------------------------------------------------- traps


def one_response(rewards: float, values: list[float], **options: float) -> tuple[Tensor, Tensor]:
    n = len(values)
    return gae(
        torch.tensor([rewards]),
        torch.tensor(values),
        kl_rewards=torch.zeros(n),
        **packed(n),
        **options,
    )


def test_gae_at_the_ends_of_lambda():
    values = [0.5, 0.25, 0.75]
    got, returns = one_response(1.0, values, lam=1.0)
    assert got.tolist() == [0.5, 0.75, 0.25]  # R - V
    assert returns.tolist() == [1.0, 1.0, 1.0]
    got, returns = one_response(1.0, values, lam=0.0, value_lam=0.0)
    assert got.tolist() == [-0.25, 0.5, 0.25]  # V' - V, R - V at the end
    assert returns.tolist() == [0.25, 0.75, 1.0]


def test_the_adaptive_lambda_of_a_short_response_is_clamped_at_zero():
    short, _ = one_response(1.0, [0.5, 0.25, 0.75], length_alpha=0.05)  # 1 - 1 / .15 < 0
    assert short.tolist() == [-0.25, 0.5, 0.25]
    long, _ = one_response(1.0, [0.0] * 40, length_alpha=0.05)  # 1 - 1 / 2
    assert long[38].item() == pytest.approx(0.5)


def test_the_reward_stands_at_the_last_loss_token_not_at_the_last_token():
    mask = torch.tensor([False, True, False, True, False])
    got, _ = reinforce_plus_plus(
        torch.tensor([1.0]),
        torch.tensor([9.0, -0.25, 9.0, -0.5, 9.0]),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, 5], dtype=torch.int32),
    )
    assert got.tolist() == [0.0, 0.25, 0.0, 0.5, 0.0]


def test_a_sample_alone_at_a_position_has_no_token_baseline():
    batch = dict(kl_rewards=torch.zeros(5), group_ids=torch.tensor([0, 0]), **packed(2, 3))

    def run(rewards: list[float]) -> Tensor:
        own = batch | {"rewards": torch.tensor(rewards, dtype=torch.float64)}
        totals = token_baselines.otb_totals(
            old_logprobs=torch.full((5,), math.log(0.7)),
            square_probs=torch.full((5,), 0.53),
            num_groups=1,
            num_positions=3,
            **own,
        )
        return otb(**totals, **own)[0]

    for reward in (0.1, 1 / 3, 0.7, -1e6):
        got = run([1.0, reward])
        half = (1.0 - reward) / 2
        assert got.tolist() == pytest.approx([half, half, -half, -half, 0.0])
        assert got[4] == 0
        assert (run([reward, reward * (1 + 4e-16)]) == 0).all()  # equal up to rounding


def test_tokens_that_were_certain_have_no_token_baseline():
    batch = dict(
        rewards=torch.tensor([1.0, 0.0]).double(),
        kl_rewards=torch.zeros(2),
        group_ids=torch.tensor([0, 0]),
        **packed(1, 1),
    )
    totals = token_baselines.otb_totals(
        old_logprobs=torch.zeros(2),
        square_probs=torch.ones(2),
        num_groups=1,
        num_positions=1,
        **batch,
    )
    assert otb(**totals, **batch)[0].tolist() == [0.0, 0.0]


def test_a_teacher_that_forbids_a_token_gives_a_finite_advantage():
    got, _ = distill(torch.tensor([-1.0, -1.0]), torch.tensor([-math.inf, -0.5]), **packed(2))
    assert got.tolist() == [-20.0, 0.5]


def test_a_process_baseline_that_is_missing_leaves_the_outcome():
    got, _ = prime(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-3.0, -1.0]),
        rewards=torch.tensor([1.0]),
        process_baselines=torch.tensor([math.nan]),
        episode_advantages=torch.tensor([0.75]),
        beta=1.0,
        **packed(2),
    )
    assert got.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "otb"])
def test_a_reward_that_is_not_finite_is_refused(name):
    batch = everything(0)
    rewards = batch["rewards"].clone()
    rewards[2] = math.inf
    with pytest.raises(ValueError, match="sequence 2 of the micro-batch is inf"):
        METHODS[name](batch | {"rewards": rewards})


@pytest.mark.parametrize(
    "option, value", [("gamma", 1.1), ("lam", -0.1), ("value_lam", 2.0), ("length_alpha", -1.0)]
)
def test_options_out_of_range_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option}: must be"):
        one_response(1.0, [0.0], **{option: value})


def test_other_options_out_of_range_are_refused():
    batch = everything(0)
    with pytest.raises(ValueError, match="max_gap"):
        distill(**pick(batch, "old_logprobs", "teacher_logprobs"), max_gap=0.0)
    with pytest.raises(ValueError, match="step_weight"):
        gigpo(**pick(batch, "episode_advantages", "step_table"), step_weight=-1.0)
    with pytest.raises(ValueError, match="gamma"):
        token_baselines.gigpo_steps(torch.zeros(2, 1, 2), torch.zeros(2), gamma=1.5, **ONE_GROUP)
    with pytest.raises(ValueError, match="gamma"):
        prime(**pick(batch, *PRIME), gamma=-1.0)


def test_every_response_token_has_one_place():
    batch = columns(3)
    tokens = loss_tokens(batch["loss_mask"], batch["cu_seqlens"])
    rows = responses(batch)
    assert tokens.index.tolist() == [t for row in rows for t in row]
    assert tokens.position.tolist() == [n for row in rows for n in range(len(row))]
    assert tokens.counts.tolist() == [len(row) for row in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_cuda_gives_what_the_cpu_gives(name):
    batch = everything(4)
    there = {n: v.cuda() for n, v in batch.items()}
    for got, expected in zip(METHODS[name](there), METHODS[name](batch)):
        assert expected is None or torch.allclose(got.cpu(), expected, atol=1e-12)
    assert torch.allclose(otb_totals(there).cpu(), batch["otb_totals"], atol=1e-12)
