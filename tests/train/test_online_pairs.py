"""Preferences among sampled responses: which pairs, their loss by hand, layouts, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from spmdrl.algorithms.groups import best_and_worst
from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.config.fields import least_tokens, sequences_together, useful_tokens
from spmdrl.credit import advantages_of
from spmdrl.exchange import exchange_rollouts
from spmdrl.types import Batch, Rollouts, Scalars
from spmdrl.world.world import World
from tests.helpers.built import examples
from tests.helpers.comparing import assert_near, assert_same_sums, full_parameters
from tests.helpers.policy_runs import VALID, changed, config, small_model
from tests.helpers.worlds import in_world, make_trainer


@examples(60, seed=st.integers(0, 10_000), groups=st.integers(1, 6), levels=st.integers(1, 4))
def test_pairs_are_the_best_and_the_worst_of_groups_that_differ(seed, groups, levels):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, groups, (14,), generator=generator) * 3
    rewards = torch.randint(0, levels, (14,), generator=generator).double()
    is_valid = torch.rand(14, generator=generator) < 0.8
    rewards[~is_valid] = math.nan
    expected = []
    for group in sorted(set(ids.tolist())):
        rows = [i for i in range(14) if ids[i] == group and is_valid[i]]
        if len({float(rewards[i]) for i in rows}) > 1:
            best = max(rows, key=lambda i: (float(rewards[i]), -i))
            worst = min(rows, key=lambda i: (float(rewards[i]), i))
            expected.append([best, worst])
    assert best_and_worst(rewards, ids, is_valid=is_valid).tolist() == expected


# ---------------------------------------------------------------- training

GROUPS, SIZE = 5, 4
LENGTHS = [[7, 5, 9, 6], [4, 8, 5, 5], [9, 9, 7, 6], [5, 6, 7, 8], [6, 4, 5, 9]]
REWARDS = [[0.2, 1.0, -0.5, 0.2], [1.0, 1.0, 1.0, 1.0], [0.0, 9.0, 0.0, 1.0],
           [3.0, 2.0, 1.0, 0.0], [0.5, 0.1, 0.5, 0.1]]  # fmt: skip
INVALID = [(2, 1), (3, 3)]
PAIRS = [[1, 2], [11, 8], [12, 14], [16, 17]]
"""Of the rows: groups 0, 2 (whose best failed), 3 (whose worst did) and 4 (ties: the first)."""


def _rollouts(world: World) -> Rollouts:
    """All groups' samples, held by rank 0: a third of each is its prompt."""
    rows = [(g, s) for g in range(GROUPS) for s in range(SIZE)] if world.rank == 0 else []
    lengths = torch.tensor([LENGTHS[g][s] for g, s in rows], dtype=torch.int64)
    masks = [torch.arange(n) >= (n + 2) // 3 for n in lengths.tolist()]
    mask = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
    drawn = [
        torch.randint(8, 96, (LENGTHS[g][s],), generator=torch.Generator().manual_seed(9 * g + s))
        for g, s in rows
    ]
    ids = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    return Rollouts(
        tokens=torch.cat([torch.zeros(0, dtype=torch.int64), *drawn]),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -3.0, 0.0),
        policy_versions=torch.where(mask, 0, -1),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        scalars=Scalars(
            lengths=lengths,
            response_lengths=lengths - (lengths + 2) // 3,
            group_ids=ids[:, 0],
            sample_ids=ids[:, 1],
            rewards=torch.tensor([REWARDS[g][s] for g, s in rows], dtype=torch.float64),
            is_truncated=torch.zeros(len(rows), dtype=torch.bool),
            is_valid=torch.tensor([key not in INVALID for key in rows], dtype=torch.bool),
            min_versions=torch.zeros(len(rows), dtype=torch.int64),
        ),
    )


def _config(folder: Path, where: Path, loss: str, *, budget: int = 40, **layout: int) -> Config:
    options = {"beta": 0.5}
    cfg = config(folder, where, objective="online_preference", loss=loss, loss_options=options)
    return changed(cfg, layout=layout, batch={"tokens_per_microbatch": budget, "group_size": SIZE})


def _step(trainer: Any, *, step: int) -> tuple[Batch, dict]:
    cfg, world = trainer.cfg, trainer.world
    batch = trainer.annotate(exchange_rollouts(_rollouts(world), world, step=step), step=step)
    found = advantages_of(batch, cfg=cfg, world=world, step=step)
    return batch, trainer.update(batch, found, step=step)


def _logps(trainer: Any, batch: Batch) -> torch.Tensor:
    """Sum log pi / pi_ref over each sequence's response: [S] float64."""
    rho = torch.zeros(len(batch.scalars), dtype=torch.float64)
    own = zip(trainer.logprobs(batch), batch.updates[0], batch.columns[0])
    for logprobs, micro, columns in own:
        for at, row in enumerate(micro.sequence_ids.tolist()):
            span = slice(int(micro.cu_seqlens[at]), int(micro.cu_seqlens[at + 1]))
            gap = logprobs[span].double() - columns["ref_logprobs"][span].double()
            rho[row] = gap[micro.response_mask[span]].sum()
    return rho


def _trained(world: World, cfg: Config) -> dict:
    trainer = make_trainer(cfg, world)
    sums = [_step(trainer, step=step)[1] for step in range(3)]
    return {"sums": sums, "parameters": full_parameters(trainer)}


def _by_hand(world: World, cfg: Config) -> dict:
    """The loss of a policy that has left its reference, by the program and from its logprobs."""
    trainer = make_trainer(cfg, world)
    for step in range(2):
        _step(trainer, step=step)
    before = exchange_rollouts(_rollouts(world), world, step=2)
    rho = _logps(trainer, trainer.annotate(before, step=2))
    sums = _step(trainer, step=2)[1]
    best, worst = rho[torch.tensor(PAIRS)].unbind(1)
    if cfg.algorithm.loss == "sppo":
        terms = (best - 1) ** 2 + (worst + 1) ** 2
    elif cfg.algorithm.loss == "aot_unpaired":
        terms = -logsigmoid(0.5 * (best.sort().values - worst.sort().values))
    else:
        terms = -logsigmoid(0.5 * (best - worst))
    return {"expected": float(terms.mean()), "sums": sums}


@pytest.mark.parametrize("loss", ["dpo", "sppo", "aot_unpaired"])
def test_the_loss_is_of_the_best_and_the_worst(loss, tmp_path):
    cfg = _config(small_model(tmp_path), tmp_path, loss)
    found = in_world(cfg, _by_hand, cfg)[0]
    assert found["sums"]["policy/loss"][0] == pytest.approx(found["expected"], rel=1e-5)
    assert found["sums"]["preference/accuracy"][1] == len(PAIRS)
    assert abs(found["expected"] - {"sppo": 2.0}.get(loss, math.log(2))) > 1e-3


def test_every_layout_and_packing_trains_alike(tmp_path):
    folder = small_model(tmp_path)
    cfg = _config(folder, tmp_path, "dpo")
    one = in_world(cfg, _trained, cfg)[0]
    assert one["sums"][-1]["policy/loss"][0] < one["sums"][0]["policy/loss"][0]
    others = [_config(folder, tmp_path, "dpo", budget=200)]
    others += [_config(folder, tmp_path, "dpo", world_size=2, tp=tp) for tp in (1, 2)]
    for other in others:
        for ours in in_world(other, _trained, other):
            assert_same_sums(ours["sums"], one["sums"], "", rel=1e-4, abs_=1e-5)
            assert_near(ours["parameters"], one["parameters"], "", rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- settings


def _found(**fields: dict) -> list[str]:
    chosen = {"objective": "online_preference", "loss": "dpo"}
    fields["algorithm"] = chosen | fields.get("algorithm", {})
    return validate(changed(VALID, **fields))


def test_settings_of_sampled_pairs():
    assert not _found()
    assert not _found(algorithm={"loss": "sppo"}, model={"reference": {"sync_every": 1}})
    for fields, text in (
        ({"algorithm": {"loss": "kto"}}, "algorithm.loss: kto with algorithm.objective"),
        ({"algorithm": {"loss": "ppo_clip"}}, "algorithm.loss: unknown preference 'ppo_clip'"),
        ({"batch": {"group_size": 1}}, "batch.group_size: 1 with algorithm.objective online_pref"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k: 5 with algorithm.objective"),
        ({"algorithm": {"loss": "aot"}, "batch": {"epochs": 2}}, "batch.epochs: 2 with"),
        (
            {"batch": {"tokens_per_microbatch": 2000}},
            "batch.tokens_per_microbatch: 2000 is below 8",
        ),
        (
            {"model": {"reference": {"cache": True}}},
            "model.reference.cache: true with algorithm.objective",
        ),
    ):
        found = _found(**fields)
        assert any(one.startswith(text) for one in found), (text, found)


def test_a_micro_batch_has_room_for_a_group():
    online = {"objective": "online_preference", "loss": "dpo"}
    cfg = changed(VALID, algorithm=online, batch={"group_size": 4, "prompts_per_step": 6})
    assert sequences_together(cfg) == 4 and least_tokens(cfg) == 4 * cfg.longest_sequence
    assert useful_tokens(cfg) == 6 * 4 * cfg.longest_sequence
    assert useful_tokens(changed(cfg, algorithm={"objective": "rl"})) == useful_tokens(cfg)
