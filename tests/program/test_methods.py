"""Every named method, and a few known mixtures, takes three steps of train.py's own loop.

One process runs them one after the other, with one real vLLM engine. A method that is added to
the registry takes part by its name alone. By default the first of those that ask the loop for the
same tensors runs; what each computes of them, other tests hold against plain loops.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from spmdrl import config
from spmdrl.algorithms import registry
from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.config.objectives import OBJECTIVES
from spmdrl.world.world import World
from tests.helpers.policy_runs import changed, small_model
from tests.helpers.policy_runs import config as policy_config
from tests.helpers.ranks import run_ranks
from tests.program.test_train import final_weights

STEPS = 3
# Differ within a group; one in some ten samples cannot be rewarded and is left out.
REWARDS = """
def spread(prompts, completions, **columns):
    value = sum(map(ord, completions[0])) % 11
    if value == 10:
        raise ValueError("no reward")
    return [value / 10]
spread.scope = "sample"
def length(prompts, completions, **columns): return [len(c) % 3 for c in completions]
"""
# Two turns, whose states a prompt's samples share.
GAME = """
from spmdrl.environments.protocol import Turn
class Game:
    turns = 0
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, response):
        self.turns += 1
        return Turn([{"role": "user", "content": "?"}], is_done=self.turns == 2,
                    reward=len(response.text) % 3)
    def state(self):
        return self.turns
"""
# A model that knows nothing seldom ends a response: let every digit end one.
DIGITS = "0123456789"
MIXTURES: dict[str, dict[str, Any]] = {
    "sft": {"objective": "sft"},
    "online_dpo": {"objective": "online_preference", "loss": "dpo"},
    "self_play_sppo": {
        "objective": "online_preference",
        "loss": "sppo",
        "reference": config.ReferenceSettings(sync_every=1),
    },
    "on_policy_distill": {
        "objective": "on_policy_distill",
        "loss": "distill_topk",
        "loss_options": {"kind": "reverse", "k": 8},
    },
    "dapo": {
        "loss_options": {"clip_low": 0.2, "clip_high": 0.28},
        "mask_truncated": True,
        "shaping": config.ShapingSettings(overlong_tokens=3),
    },
    "ppo": {"advantage": "gae", "kl": "k1", "kl_coef": 0.05, "kl_in": "reward"},
    "gdpo of two rewards": {"advantage": "gdpo", "functions": ("spread", "length")},
    "remax with an entropy bonus": {"advantage": "remax", "entropy_coef": 0.01},
    "top entropy and moving coefficients": {
        "entropy_control": {"keep_frac": 0.5, "target": 1.0, "delta": 0.01},
        "kl_coef": 0.1,
        "kl_control": {"target": 0.01, "horizon": 100},
    },
    "top entropy tokens": {"entropy_control": {"keep_frac": 0.2}},
    "adaptive entropy bonus": {
        "entropy_coef": 0.01,
        "entropy_control": {"target": 9.0, "delta": 0.005, "lower": 0.0, "upper": 0.1},
    },
    "scheduled kl and entropy": {
        "kl_coef": 0.1,
        "kl_schedule": {"end": 0.01, "steps": 1},
        "entropy_schedule": {"end": 0.05, "steps": 3},
    },
    "adaptive kl": {"kl_coef": 0.1, "kl_control": {"target": 0.01, "horizon": 1000}},
    "a reference that follows": {
        "kl_coef": 0.1,
        "reference": config.ReferenceSettings(sync_every=2, sync_mix=0.6),
    },
    "dpo of a cached reference": {
        "objective": "preference",
        "loss": "dpo",
        "reference": config.ReferenceSettings(cache=True),
    },
    "decoupled_ppo one step behind": {"loss": "decoupled_ppo", "correction": "none", "lag": 1},
    **{
        f"kl {name} off the reward of {advantage}": {
            "advantage": advantage,
            "kl": name,
            "kl_coef": 0.1,
            "kl_in": "reward",
        }
        for name in registry.names("kl")
        for advantage in ("grpo", "reinforce_plus_plus")
    },
}


def methods() -> dict[str, dict[str, Any]]:
    """Return {name: settings} of every method of the registry, and of the mixtures."""
    found = {}
    for name in registry.names("loss"):
        corrects = "rollout_logprobs" in registry.inputs_of(registry.get("loss", name))
        found[f"loss {name}"] = {"loss": name, "correction": "none" if corrects else "tis"}
        if allowed := getattr(registry.get("loss", name), "aggregations", ()):
            found[f"loss {name}"]["aggregation"] = allowed[0]
    for kind in ("advantage", "correction"):
        found |= {f"{kind} {name}": {kind: name} for name in registry.names(kind)}
    for name in registry.names("advantage"):
        if "turns" in registry.inputs_with_helpers(registry.get("advantage", name)):
            found[f"advantage {name}"]["environment"] = True
    for name in registry.names("kl"):
        # k1 alone has no gradient on average, and is refused.
        found[f"kl {name}"] = {"kl": name, "kl_coef": 0.1, "kl_options": {"unbiased": True}}
    for kind in ("preference", "reward_model", "distillation"):
        objective = "distill" if kind == "distillation" else kind
        found |= {
            f"{kind} {name}": {"objective": objective, "loss": name}
            for name in registry.names(kind)
        }
    return found | MIXTURES


METHODS = methods()


def _asked(name: str) -> tuple:
    """Return what the loop has to find for a method."""
    settings = METHODS[name]
    if settings.get("kl_in") == "reward" and name != "ppo":
        return "kl off the reward", settings["advantage"]
    if name in ("adaptive kl", "adaptive entropy bonus", "top entropy tokens"):
        return ("top entropy and moving coefficients",)
    if name in MIXTURES:
        return (name,)
    kind, _, method = name.partition(" ")
    return kind, tuple(sorted(registry.inputs_with_helpers(registry.get(kind, method))))


DEFAULT = [*{_asked(name): name for name in reversed(METHODS)}.values()][::-1]
REST = [name for name in METHODS if name not in DEFAULT]


def _config(where: Path, name: str, settings: dict[str, Any]) -> Config:
    settings = dict(settings)
    functions, lag = settings.pop("functions", ("spread",)), settings.pop("lag", 0)
    reference = settings.pop("reference", config.ReferenceSettings())
    has_turns = settings.pop("environment", False)
    game = {"name": f"{where / 'game.py'}:Game"} if has_turns else {}
    longest = 64 if has_turns else 8
    shaping, is_rl = (
        settings.pop("shaping", config.ShapingSettings()),
        OBJECTIVES[settings.get("objective", "rl")].samples,
    )
    rows_are_alone = settings.get("objective") != "online_preference"
    stops = AutoTokenizer.from_pretrained(where / "start").convert_tokens_to_ids(list(DIGITS))
    model = {"teacher": str(where / "teacher"), "reference": reference}
    return changed(
        policy_config(where / "start", where / "runs" / name.replace(" ", "_"), **settings),
        steps=STEPS,
        lag=lag,
        layout={"placement": "colocated" if is_rl else "offline"},
        model=model | {"memory": config.MemorySettings()},
        data=dict(
            train="task:addition" if is_rl else "task:addition_pairs",
            size=1000,
            task_options={"digits": 2},
            max_prompt_tokens=112 - longest,
        ),
        batch=dict(
            prompts_per_step=4,
            group_size=4,
            tokens_per_microbatch=224 if rows_are_alone else 448,
            updates_per_step=2 if is_rl else 1,
        ),
        rollout={"environment": game},
        sampling=config.SamplingSettings(
            max_response_tokens=longest, stop_token_ids=(*stops,) if is_rl else ()
        ),
        optimizer=config.OptimizerSettings(lr=1e-3),
        critic={"lr": 1e-3},
        engine=dict(dtype="float32", cpu_kv_cache_gib=0.1, max_num_seqs=32),
        stream={"mode": "traced"},
        rewards=dict(
            functions=tuple(f"{where / 'r.py'}:{f}" for f in functions) if is_rl else (),
            shaping=shaping,
            on_failure="drop",
        ),
        report={"trackers": []},
    )


class _World(World):
    """A world that one run after the other takes part in."""

    def close(self) -> None:
        pass


class _Engines:
    """Stands where make_engine finds `VllmEngine`: gives every run the same real engine, as built.

    Building it is 10 s of each start. The first push of a run writes that run's weights into it,
    and the loop's own proofs compare them.
    """

    def __init__(self) -> None:
        from spmdrl.engine.vllm.engine import VllmEngine

        self._make, self._engine, self._weights = VllmEngine, None, []
        self.close = lambda: None

    def __call__(self, cfg: Config, world: World) -> Any:
        if not world.inference_ranks:
            return self._make(cfg, world)
        if self._engine is None:
            self._engine = self._make(cfg, world)
            self._weights = [p.detach().clone() for p in self._engine.model.parameters()]
            self.close, self._engine.close = self._engine.close, lambda: None
        for live, first in zip(self._engine.model.parameters(), self._weights):
            live.data.copy_(first)
        self._engine.cfg, self._engine.world = cfg, world
        self._engine.weights_changed(-1)
        return self._engine


def _once(function: Callable) -> Callable:
    """Return a function that calls another one once, and then returns the same."""
    results: list[Any] = []

    def called(*args: Any, **options: Any) -> Any:
        if not results:
            results.append(function(*args, **options))
        return results[0]

    return called


def _run_all(configs: dict[str, Config]) -> dict[str, str]:
    """Run each config by `train.train`; return the traceback of each that raised."""
    import train
    from spmdrl.engine.vllm import engine as vllm_engine
    from spmdrl.report import report
    from spmdrl.same_run import made_of
    from spmdrl.train.trainer import Trainer

    vllm_engine.VllmEngine = engines = _Engines()
    report.draw = lambda *runs, **options: False  # the picture at the end: half of a run's time
    # Start-up is the same for all runs, and a third of the rest.
    report.save_environment = _once(report.save_environment)
    made_of.digest = functools.cache(made_of.digest)
    Trainer.check_packing = _once(Trainer.check_packing)
    world, failures = _World.start(next(iter(configs.values()))), {}
    for name, cfg in configs.items():
        try:
            train.train(cfg, dataclasses.replace(world, cfg=cfg))
        except Exception:
            failures[name] = traceback.format_exc()
    if any(cfg.engine.kind == "vllm" and cfg.objective.samples for cfg in configs.values()):
        assert engines._engine is not None, "the runs have not shared one engine"
    engines.close()
    World.close(world)
    return failures


def _results(where: Path, names: list[str]) -> tuple[Path, dict[str, str]]:
    """Return the folder of all runs, and what failed in which."""
    (where / "r.py").write_text(REWARDS)
    (where / "game.py").write_text(GAME)
    for name, seed in (("start", 0), ("teacher", 5)):
        sizes = dict(hidden_size=64, layers=1, heads=2, kv_heads=1, max_positions=128)
        small_model(where, name, seed=seed, chat_template=True, **sizes)
    configs = {name: _config(where, name, METHODS[name]) for name in names}
    problems = {name: found for name, cfg in configs.items() if (found := validate(cfg))}
    assert not problems
    (failures,) = run_ranks(1, _run_all, configs)
    return where, failures


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    return _results(tmp_path_factory.mktemp("methods"), DEFAULT)


@pytest.fixture(scope="module")
def rest(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    return _results(tmp_path_factory.mktemp("rest"), REST)


def _check_that_pushes_arrive(settings: dict[str, Any], gaps: list[float]) -> None:
    """Check the KL between the engine that sampled and the trainer before its update."""
    loss = registry.get("loss", settings.get("loss", "ppo_clip"))
    if "lag" in settings:  # the weights of one step ago
        assert gaps[0] < 1e-6 < min(gaps[1:])
    elif "old_logprobs" in registry.inputs_of(loss):
        assert max(gaps) < 1e-6
    else:  # measured during the step's two updates
        assert max(gaps) < 1e-3


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("name", DEFAULT)
@pytest.mark.proves("critic", "kl_reference", "colocated")
@pytest.mark.proves("distillation", "colocated")
@pytest.mark.proves("online_preference", "colocated")
@pytest.mark.proves("environments", "colocated")
@pytest.mark.proves("lag", "colocated")
def test_three_steps_train_the_policy(name, ran):
    _check_steps(name, *ran)


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("name", REST)
def test_three_steps_of_any_other_method_do_too(name, rest):
    _check_steps(name, *rest)


def _check_steps(name: str, where: Path, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
    folder = where / "runs" / name.replace(" ", "_")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "policy/loss" in row]
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert row["policy/loss"] is not None and math.isfinite(row["policy/loss"])
        assert row["policy/skipped_updates"] == 0 and row["policy/grad_norm"] > 0
    if METHODS[name].get("objective", "rl") == "rl":
        assert all(row["reward/std"] > 0 for row in rows)
        assert sum(row["rollout/failed_rewards"] for row in rows) > 0
        _check_that_pushes_arrive(METHODS[name], [row["policy/mismatch_k3"] for row in rows])
    before = load_file(where / "start" / "model.safetensors")
    saved = final_weights(folder).items()
    after = {n.removeprefix(".model."): t for n, t in saved if n.startswith(".model.")}
    compared = before.keys() & after.keys()
    assert len(compared) >= len(before) - 1  # a reward model has no language head
    assert not [key for key in compared if torch.equal(before[key], after[key])]
