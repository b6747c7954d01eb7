"""Every named method takes part in a training step: what it asks for, it gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from policy_runs import LENGTHS, batch, config
from ranks import run_ranks

from spmdrl.algorithms import registry
from spmdrl.config import Config
from spmdrl.create_model import create_model
from spmdrl.types import Batch

STEPS = 3


def _configs(start: Path, teacher: Path, where: Path) -> dict[str, Config]:
    """Return one config for each method, with what it needs beside it."""
    model = {"teacher": str(teacher)}

    def one(**options: object) -> Config:
        return config(start, where, updates=2, model=model, **options)

    found = {}
    for name in registry.names("loss"):
        corrects = "rollout_logprobs" in registry.inputs_of(registry.get("loss", name))
        found[f"loss {name}"] = one(loss=name, correction="none" if corrects else "tis")
    for name in registry.names("advantage"):
        found[f"advantage {name}"] = one(advantage=name)
    for name in registry.names("correction"):
        found[f"correction {name}"] = one(correction=name)
    for name in registry.names("kl"):
        found[f"kl {name}"] = one(kl=name, kl_coef=0.1, kl_options={"unbiased": True})
    return found


def _train(first: Config, configs: dict[str, Config]) -> dict[str, list[dict]]:
    from spmdrl.credit import advantages_of
    from spmdrl.policy import Policy
    from spmdrl.world import World

    world = World.start(first)
    found = {}
    for name, cfg in configs.items():
        policy, own = Policy(cfg, world), batch(0, 1, updates=2)
        rewards = torch.linspace(0, 2, len(LENGTHS)).double().cos().abs()
        scalars = dataclasses.replace(
            own.scalars, rewards=rewards, reward_parts=rewards[:, None],
            greedy_rewards=rewards.flip(0))
        own = dataclasses.replace(own, scalars=scalars, updates=_sampled(own, policy))
        for step in range(STEPS):
            annotated = policy.annotate(own, step=step)
            credit = advantages_of(annotated, cfg, world, step=step)
            found.setdefault(name, []).append(policy.update(annotated, credit, step=step))
    world.close()
    return found


def _sampled(own: Batch, policy: object) -> tuple:
    """Return the micro-batches as if the policy itself had sampled them, up to rounding."""
    logprobs = iter(policy.logprobs(own))
    return tuple(tuple(dataclasses.replace(m, rollout_logprobs=next(logprobs) + 1e-4)
                       for m in update) for update in own.updates)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, list[dict]]:
    """The sums of each method's steps."""
    where = tmp_path_factory.mktemp("methods")
    start, teacher = (create_model(
        where / name, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate=48, seed=seed)
        for name, seed in (("start", 0), ("teacher", 5)))
    configs = _configs(start, teacher, where)
    return run_ranks(1, _train, next(iter(configs.values())), configs)[0]


def test_every_method_of_the_registry_trains(trained):
    for name, steps in trained.items():
        assert [s["policy/skipped_updates"] for s in steps] == [(0.0, 1.0)] * STEPS, name
        assert steps[0]["policy/grad_norm"][0] > 0, name
    for kind in ("loss", "advantage", "correction", "kl"):
        assert {f"{kind} {name}" for name in registry.names(kind)} <= trained.keys()


def test_every_metric_of_every_method_is_in_the_glossary(trained):
    from spmdrl.report.glossary import lookup

    for name in {name for steps in trained.values() for sums in steps for name in sums}:
        assert lookup(name), name
