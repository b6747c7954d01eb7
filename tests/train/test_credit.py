"""Methods that need the whole batch or a model of their own: plain float64, and any mesh alike."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdrl.algorithms import registry
from spmdrl.algorithms.entropy import adaptive_entropy_coef
from spmdrl.algorithms.loss_tokens import loss_tokens
from spmdrl.algorithms.masked import attach
from spmdrl.algorithms.shaping import adaptive_kl_coef
from spmdrl.config import CoefficientScheduleSettings, Config
from spmdrl.train.coefficients import Coefficients
from tests.helpers.built import changed, made, small_model, started, training
from tests.helpers.policy_runs import LENGTHS, batch, config, sequence
from tests.helpers.ranks import run_ranks

STEPS = 3
BETA, GAMMA = 0.5, 0.9
ENTROPY = {"target": 4.3, "delta": 0.02, "upper": 0.03}
KL = {"target": 0.01, "horizon": 10.0}
REWARDS = torch.linspace(0, 3, len(LENGTHS)).double().cos().square()
CASES = {
    "otb": dict(advantage="otb", kl_coef=0.5, kl="k1", kl_in="reward"),
    "prime": dict(
        advantage="prime", advantage_options={"beta": BETA, "gamma": GAMMA}, mask_truncated=True
    ),
    "of one's own": dict(advantage=f"{__name__}:by_position"),
    "top entropy": dict(advantage="rloo", correction="none", entropy_control={"keep_frac": 0.3}),
    "moving": dict(
        advantage="rloo",
        updates=2,
        entropy_coef=0.01,
        entropy_control=ENTROPY,
        kl_coef=0.1,
        kl_control=KL,
    ),
    "moving, in the reward": dict(
        advantage="rloo", kl_coef=0.1, kl="k1", kl_in="reward", kl_control=KL
    ),
    "all at once": dict(
        advantage="prime",
        updates=2,
        entropy_coef=0.01,
        kl_coef=0.1,
        entropy_control=ENTROPY | {"keep_frac": 0.5},
        kl_control=KL,
    ),
}


def table(
    old_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    num_positions: int,
) -> dict[str, Tensor]:
    """Put the logprobs of a micro-batch at their places in the whole batch: [B, L]."""
    tokens = loss_tokens(loss_mask, cu_seqlens)
    own = torch.zeros(num_sequences, num_positions, dtype=torch.float64)
    own[sequence_ids[tokens.sequence], tokens.position] = tokens.take(old_logprobs)
    return {"table": own}


def group_leads(table: Tensor, group_ids: Tensor) -> dict[str, Tensor]:
    """Subtract the mean over the prompt's samples at each position: [B, L]."""
    return {"leads": table - torch.stack([table[group_ids == g].mean(0) for g in group_ids])}


@attach(totals=table, per_sequence=group_leads)
def by_position(leads: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    """Compare each token with the prompt's others at its position, as gigpo does with turns."""
    tokens = loss_tokens(loss_mask, cu_seqlens)
    return tokens.put(leads[tokens.sequence, tokens.position]), None


@attach(totals=table, per_sequence=lambda tabel: {"leads": tabel})
def misspelt(leads: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    """Do as by_position, with a companion that asks for what nobody gives."""
    return by_position(leads, loss_mask=loss_mask, cu_seqlens=cu_seqlens)


def _config(case: str, folders: dict[str, str], out: Path, **layout: int) -> Config:
    model = {"reference": {"path": folders["reference"]}}
    cfg = config(folders["start"], out, model=model, **CASES[case], **layout)
    return changed(cfg, critic=dict(path=folders["prm"], lr=2e-2))


def _batch(world: object, cfg: Config) -> object:
    own = batch(world.dp_index(world.rank), world.dp_size, updates=cfg.batch.updates_per_step)
    return changed(own, scalars=dict(rewards=REWARDS))


def _step(trainer: object, own: object, *, step: int) -> tuple[object, object, dict]:
    """As train.py does: annotate, credit, update."""
    from spmdrl.credit import advantages_of

    annotated = trainer.annotate(own, step=step)
    advantages = advantages_of(annotated, cfg=trainer.cfg, world=trainer.world, step=step)
    return annotated, advantages, trainer.update(annotated, advantages, step=step)


def _whole_state(trainer: object) -> dict[str, Tensor]:
    from spmdrl.checkpoint.state import tensor_leaves

    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for name, t in tensor_leaves(trainer.state_dict()).items()
    }


def _train(first: Config, configs: dict[str, Config]) -> dict[str, dict]:
    """Return of each case the step's sums, step 0's advantages by sequence, and the end state."""
    from spmdrl.roles import make_trainer

    found = {}
    with started(first) as world:
        for case, cfg in configs.items():
            trainer, own, sums = make_trainer(cfg, world), _batch(world, cfg), []
            for step in range(STEPS):
                annotated, credit, updated = _step(trainer, own, step=step)
                sums.append(updated)
                if step == 0:
                    rows = {}
                    for micro, tokens in zip(sum(own.updates, ()), sum(credit.tokens, ())):
                        pieces = tokens.split(micro.cu_seqlens.diff().tolist())
                        rows |= dict(zip(micro.sequence_ids.tolist(), pieces))
            found[case] = dict(sums=sums, advantages=rows, kl_coef=annotated.kl_coef)
            found[case]["state"] = _whole_state(trainer)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    where = tmp_path_factory.mktemp("models")
    return {
        name: str(small_model(where / name, layers=1, seed=seed, initializer_std=0.2))
        for name, seed in (("start", 0), ("reference", 7), ("prm", 9))
    }


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> dict[str, list[dict]]:
    """Results of every case by layout, per rank."""
    where, results = tmp_path_factory.mktemp("credit"), {}
    layouts = {"one": {}, "dp": dict(world_size=2), "tp": dict(world_size=2, tp=2)}
    for name, layout in layouts.items():
        configs = {case: _config(case, folders, where, **layout) for case in CASES}
        results[name] = run_ranks(layout.get("world_size", 1), _train, configs["otb"], configs)
    return results


@pytest.mark.parametrize("layout", ["dp", "tp"])
@pytest.mark.parametrize("case", CASES)
def test_every_layout_trains_like_one_process(case, layout, trained):
    one = trained["one"][0][case]
    for ours in (rank[case] for rank in trained[layout]):
        for a, b in zip(ours["sums"], one["sums"], strict=True):
            assert a.keys() == b.keys()
            for name, (x, n) in b.items():
                if name.startswith("policy/mismatch"):
                    continue  # squares of large ratios: the rows are not the policy's own
                assert a[name][1] == pytest.approx(n, rel=1e-6), name
                close = math.isclose(a[name][0], x, rel_tol=2e-4, abs_tol=2e-5 * max(1, n))
                assert close, (name, a[name], (x, n))
        for row, tokens in ours["advantages"].items():
            if row >= 0:
                torch.testing.assert_close(tokens, one["advantages"][row], rtol=1e-4, atol=1e-5)
        assert ours["state"].keys() == one["state"].keys()
        for name, expected in one["state"].items():
            told = dict(msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(ours["state"][name], expected, rtol=1e-4, atol=1e-5, **told)


# --------------------------------------------------------------------------- plain float64


@functools.cache
def _model(folder: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def _distributions(folder: str, row: int) -> Tensor:
    """Return log pi of the response's tokens over the vocabulary: [L, V], with a graph."""
    tokens, begin = sequence(row), (LENGTHS[row] + 2) // 3
    logits = _model(folder)(tokens[None]).logits[0, begin - 1 : -1]
    return (logits / 0.8).log_softmax(-1)


def _logprobs(folder: str, row: int) -> Tensor:
    """Return log pi of the response's tokens: [L], with a graph."""
    response = sequence(row)[(LENGTHS[row] + 2) // 3 :, None]
    return _distributions(folder, row).gather(1, response)[:, 0]


def _gradient_norm(model: torch.nn.Module, loss: Tensor) -> float:
    model.zero_grad()
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(torch.cat(grads).norm())


def _groups(row: int, rows: tuple[int, ...]) -> list[int]:
    """Return the sequences of the same prompt."""
    return [other for other in rows if other // 2 == row // 2]


def _assert_advantages(trained: dict, case: str, expected: dict[int, Tensor]) -> None:
    for ranks in trained.values():
        for rank in ranks:
            for row, tokens in rank[case]["advantages"].items():
                if row in expected:
                    torch.testing.assert_close(
                        tokens[(LENGTHS[row] + 2) // 3 :], expected[row], rtol=1e-4, atol=2e-5
                    )
                elif row >= 0:
                    assert not tokens.any()


@torch.no_grad()
def test_the_optimal_token_baseline_is_that_of_a_plain_loop(trained, folders):
    rows = (0, 1, 2, 3, 5, 6, 7)  # 4 is not valid
    weights, returns = {}, {}
    for row in rows:
        log_pi, own = _distributions(folders["start"], row), _logprobs(folders["start"], row)
        energy = 1 - 2 * own.exp() + log_pi.exp().square().sum(-1)
        weights[row] = [math.fsum(energy[: t + 1].tolist()) for t in range(len(energy))]
        kl = -0.5 * (own - _logprobs(folders["reference"], row))
        returns[row] = [float(REWARDS[row]) + math.fsum(kl[t:].tolist()) for t in range(len(kl))]
    expected = {}
    for row in rows:
        expected[row] = torch.zeros(len(returns[row]), dtype=torch.float64)
        for t, earned in enumerate(returns[row]):
            there = [other for other in _groups(row, rows) if len(returns[other]) > t]
            if len(there) > 1:
                total = math.fsum(weights[o][t] for o in there)
                weighted = math.fsum(weights[o][t] * returns[o][t] for o in there)
                expected[row][t] = earned - weighted / total
    assert any(values.abs().max() > 0.1 for values in expected.values())
    _assert_advantages(trained, "otb", expected)


@torch.no_grad()
def test_the_advantages_of_prime_are_those_of_a_plain_loop(trained, folders):
    rows = (0, 1, 2, 3, 5, 7)  # 4 is not valid, 6 is truncated: no loss tokens
    process = {
        row: BETA * (_logprobs(folders["prm"], row) - _logprobs(folders["reference"], row))
        for row in rows
    }
    expected = {}
    for row in rows:
        outcomes = [float(REWARDS[o]) for o in _groups(row, (*rows, 6)) if o != row]
        means = [float(process[o].mean()) for o in _groups(row, rows) if o != row]
        outcome = float(REWARDS[row]) - sum(outcomes) / len(outcomes) if outcomes else 0.0
        own = process[row] - sum(means) / len(means) if means else 0.0 * process[row]
        expected[row] = torch.tensor(
            [
                outcome + sum(GAMMA ** (s - t) * float(own[s]) for s in range(t, len(own)))
                for t in range(len(own))
            ],
            dtype=torch.float64,
        )
    _assert_advantages(trained, "prime", expected)


def test_the_process_reward_model_learns_the_outcomes_by_cross_entropy(trained, folders):
    rows = (0, 1, 2, 3, 5, 7)
    scores = {
        row: BETA
        * (_logprobs(folders["prm"], row) - _logprobs(folders["reference"], row).detach()).sum()
        for row in rows
    }
    model = _model(folders["prm"])
    loss = sum(
        -REWARDS[row] * scores[row].sigmoid().log()
        - (1 - REWARDS[row]) * (1 - scores[row].sigmoid()).log()
        for row in rows
    ) / len(rows)
    norm = _gradient_norm(model, loss)
    for ranks in trained.values():
        for sums in (rank["prime"]["sums"] for rank in ranks):
            assert sums[0]["prm/loss"] == (pytest.approx(loss.item(), rel=1e-4), 1.0)
            assert sums[0]["prm/grad_norm"] == (pytest.approx(norm, rel=1e-3), 1.0)
            right = sum((scores[row] > 0).item() == (REWARDS[row] > 0.5).item() for row in rows)
            assert sums[0]["prm/accuracy"] == (right, len(rows))
            assert sums[-1]["prm/loss"][0] < sums[0]["prm/loss"][0]
            assert sums[0]["prm/lr"] == (2e-2, 1.0) and sums[0]["policy/lr"] == (1e-2, 1.0)


@torch.no_grad()
def test_a_method_of_ones_own_gets_its_rows_of_the_whole_batch(trained, folders):
    rows = (0, 1, 2, 3, 5, 6, 7)
    own = {row: _logprobs(folders["start"], row).tolist() for row in rows} | {4: []}
    expected = {
        row: torch.tensor(
            [
                value - math.fsum(own[o][t] for o in (row, row ^ 1) if t < len(own[o])) / 2
                for t, value in enumerate(own[row])
            ],
            dtype=torch.float64,
        )
        for row in rows
    }
    _assert_advantages(trained, "of one's own", expected)


def test_a_companion_that_asks_for_what_nobody_gives_is_reported():
    assert registry.problems("advantage", f"{__name__}:by_position", {}) == []
    (problem,) = registry.problems("advantage", f"{__name__}:misspelt", {})
    assert "asks for tabel; available: " in problem and "table" in problem
    assert not registry.needs_group("gae") and registry.needs_group("prime")


def test_top_entropy_trains_the_tokens_of_the_highest_entropy_alone(trained, folders):
    rows = (0, 1, 2, 3, 5, 6, 7)
    model = _model(folders["start"])
    log_pi = torch.cat([_distributions(folders["start"], row) for row in rows])
    entropy = -(log_pi.exp() * log_pi).sum(-1).detach()
    count = math.ceil(0.3 * len(entropy))
    kept = entropy >= entropy.topk(count).values[-1]
    advantages = torch.cat(
        [
            (REWARDS[row] - REWARDS[row ^ 1] if row != 5 else 0.0)
            * torch.ones(LENGTHS[row] - (LENGTHS[row] + 2) // 3).double()
            for row in rows
        ]
    )
    own = torch.cat([_logprobs(folders["start"], row) for row in rows])
    norm = _gradient_norm(model, -(advantages * own)[kept].sum() / len(own))
    for ranks in trained.values():
        for sums in (rank["top entropy"]["sums"] for rank in ranks):
            assert sums[0]["policy/low_entropy_frac"] == (len(own) - count, len(own))
            assert sums[0]["policy/loss"][0] == pytest.approx(
                float(-advantages[kept].sum() / len(own)), rel=1e-5
            )
            assert sums[0]["policy/grad_norm"][0] == pytest.approx(norm, rel=1e-3)


# --------------------------------------------------------------------------- coefficients


def _mean(sums: dict, name: str) -> float:
    return sums[name][0] / sums[name][1]


def test_coefficients_follow_the_sums_of_all_ranks(trained):
    for ranks in trained.values():
        assert all(rank["moving"]["sums"] == ranks[0]["moving"]["sums"] for rank in ranks)
        sums = ranks[0]["moving"]["sums"]
        carried = applied = 0.01
        kl = 0.1
        for one in sums:
            assert one["policy/entropy_coef"] == (applied, 1.0)
            assert one["policy/kl_coef"] == (kl, 1.0)
            carried, applied = adaptive_entropy_coef(
                carried, entropy=_mean(one, "policy/entropy"), **ENTROPY
            )
            kl = adaptive_kl_coef(
                kl, kl=_mean(one, "policy/kl_ref"), num_samples=len(LENGTHS), **KL
            )
        assert kl > 0.1 and applied != 0.01
        state = ranks[0]["moving"]["state"]
        assert state["coefficients.entropy"].tolist() == [carried, applied]
        assert float(state["coefficients.kl"]) == kl


def test_scheduled_coefficients_are_functions_of_the_step():
    schedules = dict(
        kl_schedule=CoefficientScheduleSettings(end=0.02, steps=4),
        entropy_schedule=CoefficientScheduleSettings(end=0.5, steps=2),
    )
    cfg = made(algorithm=dict(kl_coef=0.1, **schedules))
    coefficients, found = Coefficients(cfg), {}
    for step in (0, 1, 3, 4, 9, 2):
        coefficients.begin(step)
        used = coefficients.move({}, num_samples=8)
        assert used == {
            "policy/kl_coef": (coefficients.kl, 1.0),
            "policy/entropy_coef": (coefficients.entropy, 1.0),
        }
        found[step] = (coefficients.kl, coefficients.entropy)
    kl = {0: 0.1, 1: 0.08, 2: 0.06, 3: 0.04, 4: 0.02, 9: 0.02}
    assert {step: own[0] for step, own in found.items()} == pytest.approx(kl)
    entropy = {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.5, 4: 0.5, 9: 0.5}
    assert {step: own[1] for step, own in found.items()} == entropy
    assert not coefficients.state_dict(), "a resume needs none"


def test_a_moving_coefficient_acts_in_loss_and_reward(trained):
    one = trained["one"][0]["moving, in the reward"]
    used = [sums["policy/kl_coef"][0] for sums in one["sums"]]
    assert used[0] == 0.1 < used[1] < used[2] == one["kl_coef"]


def _in_the_reward(cfg: Config) -> list[Tensor]:
    """Return a sequence's advantage without KL, and with two coefficients."""
    from spmdrl.credit import advantages_of

    with training(cfg) as (world, trainer):
        annotated = trainer.annotate(_batch(world, cfg), step=0)
        assert annotated.kl_coef == cfg.algorithm.kl_coef
        found = [
            advantages_of(changed(annotated, kl_coef=coef), cfg=cfg, world=world, step=0)
            for coef in (0.0, 0.1, 0.4)
        ]
    return [torch.cat(sum(each.tokens, ())) for each in found]


class _NoSource:
    """Nothing is made ahead."""

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, states: list, step: int) -> None:
        assert states == []

    def start(self, step: int) -> None:
        pass


def _resumed(cfg: Config) -> tuple[tuple, tuple]:
    """Train after a warm-up, save, and go on twice: without a stop, and from the checkpoint."""
    from spmdrl.checkpoint import Checkpointer
    from spmdrl.roles import make_trainer

    with training(cfg) as (world, first):
        own, before = _batch(world, cfg), _whole_state(first)
        warm_up = _step(first, own, step=0)[2]
        assert "prm/loss" in warm_up and "policy/loss" not in warm_up
        moved = [n for n, t in _whole_state(first).items() if not torch.equal(t, before[n])]
        assert {name.split(".")[0] for name in moved} == {"prm"}
        _step(first, own, step=1)
        saver = Checkpointer(changed(cfg, steps=2), world)
        saver.maybe_save(2, first, _NoSource())
        saver.finish()
        second = make_trainer(cfg, world)
        assert Checkpointer(cfg, world).restore(second, _NoSource()).step == 2
        found = []
        for trainer in (first, second):
            sums = [_step(trainer, own, step=step)[2] for step in (2, 3)]
            found.append((sums, _whole_state(trainer)))
    return tuple(found)


def test_after_a_warm_up_of_the_process_reward_model_a_resumed_run_is_bit_identical(
    folders, tmp_path
):
    cfg = changed(_config("all at once", folders, tmp_path), critic=dict(warmup_steps=1))
    (sums, state), (again, restored) = run_ranks(1, _resumed, cfg)[0]
    assert sums == again and state.keys() == restored.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())
    assert {"coefficients.entropy", "coefficients.kl"} < state.keys()
    assert any(name.startswith("prm.optimizer.") for name in state)
    assert sums[0]["policy/kl_coef"][0] != 0.1 and sums[0]["policy/entropy_coef"][0] != 0.01


def test_the_kl_in_the_reward_is_weighed_by_the_coefficient_of_the_step(folders, tmp_path):
    none, small, large = run_ranks(
        1, _in_the_reward, _config("moving, in the reward", folders, tmp_path)
    )[0]
    assert (small - none).abs().max() > 0.01
    torch.testing.assert_close(large - none, 4 * (small - none), rtol=1e-6, atol=1e-9)


def _refused(cfg: Config) -> str:
    rewards = REWARDS.index_fill(0, torch.tensor(3), -1.0)
    with training(cfg) as (world, trainer):
        own = changed(_batch(world, cfg), scalars=dict(rewards=rewards))
        with pytest.raises(ValueError) as caught:
            _step(trainer, own, step=0)
    return str(caught.value)


def test_prime_refuses_rewards_that_are_no_labels_on_every_rank(folders, tmp_path):
    for text in run_ranks(2, _refused, _config("prime", folders, tmp_path, world_size=2)):
        assert "must be in [0, 1], got -1.0 (sequence 3, group 1)" in text
        assert "rewards.shaping" in text
