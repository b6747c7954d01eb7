"""The features that users combine, each by the settings that switch it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdrl.config.data import SourceSettings
from spmdrl.config.fields import Config
from spmdrl.config.tree import build, flatten


@dataclass(frozen=True)
class Feature:
    """An optional feature of a run."""

    name: str
    """As in the marker `proves` of tests."""
    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """{field: value} that switch it on; {} for a feature of the model or its files."""


_OFFLINE = {"layout.placement": "offline"}
_BASE = {
    "model.path": "model",
    "data.train": "task:addition",
    "data.size": 10,
    "layout.world_size": 16,
    "layout.trainer_ranks": 8,
}
"""Settings of every pair: eight ranks that train and eight that generate."""
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4}

FEATURES: tuple[Feature, ...] = (
    Feature("lora", "adapters train", {"model.lora.rank": 8}),
    Feature(
        "lora_push",
        "engines compute with adapters",
        {"model.lora.rank": 8} | {"model.lora.push": "adapter"},
    ),
    Feature(
        "lora_base",
        "weights under adapters are quantised",
        {"model.lora.rank": 8} | {"model.lora.base": "nf4"},
    ),
    Feature("quantised", "weights of files are quantised"),
    Feature("images", "the model takes images"),
    Feature("moe", "the model is a mixture of experts"),
    Feature("moe_replay", "routes are replayed", {"model.moe.replay": True}),
    Feature("moe_balance", "experts are balanced", {"model.moe.balance": "bias"}),
    Feature("ep", "expert parallelism", {"layout.ep": 2}),
    Feature("tp", "tensor parallelism", {"layout.tp": 2}),
    Feature("cp", "context parallelism", {"layout.cp": 2}),
    Feature("inference_tp", "an engine of several ranks", {"layout.inference_tp": 2}),
    Feature(
        "inference_dp",
        "data-parallel attention in an engine",
        {"layout.inference_dp": 2, "engine.options": {"enable_expert_parallel": True}},
    ),
    Feature("split", "ranks train or generate", {"layout.placement": "split"}),
    Feature("colocated", "ranks do both in turns", {"layout.placement": "colocated"}),
    Feature("transformers", "engine.kind transformers", {"engine.kind": "transformers"}),
    Feature("lag", "generation runs ahead", {"lag": 1}),
    Feature(
        "in_flight",
        "weights change within responses",
        {"lag": 1, "rollout.schedule.in_flight": True},
    ),
    Feature("delta", "later pushes send what changed", {"stream.delta": "always"}),
    Feature("steal", "replicas take over prompts", {"rollout.schedule.balance": "steal"}),
    Feature("over_sample", "more groups than needed", {"rollout.schedule.over_sample": 1.5}),
    Feature("dynamic", "groups without spread are replaced", {"rollout.schedule.dynamic": 3}),
    Feature("curriculum", "solved prompts come less often", {"rollout.schedule.curriculum": 0.5}),
    Feature(
        "environments", "several turns, tools", {"rollout.environment": {"name": "guess_number"}}
    ),
    Feature("agents", "agents ask the policy", {"rollout.agent": "my_agent.py:solve"}),
    Feature(
        "drafts",
        "speculative decoding, on CPUs",
        {"engine.options": {"speculative_config": _NGRAM}},
    ),
    Feature("truncated", "top_p, top_k, min_p", {"sampling.top_p": 0.9}),
    Feature("penalties", "presence or frequency penalty", {"sampling.presence_penalty": 0.5}),
    Feature("reward_model", "a model scores", {"rewards.functions": ("model:scorer",)}),
    Feature("judge", "an LLM judge scores", {"rewards.functions": ("judge.py:best",)}),
    Feature(
        "engine_judge",
        "the run's engine judges",
        {"rewards.functions": ("judge.py:own",), "rewards.judge.engine": "policy"},
    ),
    Feature("serve", "other programs ask the policy", {"rollout.serve": 4, "deterministic": False}),
    Feature("critic", "GAE with a value model", {"algorithm.advantage": "gae"}),
    Feature("kl_reference", "a KL to a reference", {"algorithm.kl_coef": 0.1}),
    Feature("epochs", "several epochs over a batch", {"batch.epochs": 2}),
    Feature(
        "distillation",
        "on-policy distillation",
        {"algorithm.objective": "on_policy_distill", "algorithm.loss": "divergence"}
        | {"model.teacher": "teacher"},
    ),
    Feature(
        "teacher_prompt",
        "the teacher reads a hint",
        {"algorithm.objective": "on_policy_distill", "algorithm.loss": "divergence"}
        | {"model.teacher": "teacher", "data.teacher_prompt": "{prompt} {answer}"},
    ),
    Feature(
        "teachers",
        "a teacher for each source",
        {"algorithm.objective": "on_policy_distill", "algorithm.loss": "divergence"}
        | {"data.train": tuple(SourceSettings("task:addition", teacher=name) for name in "ab")},
    ),
    Feature(
        "online_preference",
        "the best and the worst of a group",
        {"algorithm.objective": "online_preference", "algorithm.loss": "dpo"},
    ),
    Feature(
        "preference",
        "pairs of rows",
        {"algorithm.objective": "preference", "algorithm.loss": "dpo"} | _OFFLINE,
    ),
    Feature("sft", "responses of rows", {"algorithm.objective": "sft"} | _OFFLINE),
    Feature("muon", "the optimizer Muon", {"optimizer.kind": "muon"}),
    Feature("int8_optimizer", "moments in 8 bits", {"model.memory.optimizer_dtype": "int8"}),
    Feature(
        "float16",
        "trainer and engine in float16",
        {"model.compute_dtype": "float16", "engine.dtype": "float16"},
    ),
    Feature("offload", "optimizer state on the host", {"model.memory.offload": "optimizer"}),
    Feature("record", "rollouts are recorded", {"rollout.record.every": 1}),
    Feature("replay", "recorded rollouts train", {"rollout.record.replay": "run"} | _OFFLINE),
    Feature(
        "replay_schedule",
        "the schedule of another run",
        {"rollout.replay_schedule": "run", "rollout.schedule.balance": "steal"},
    ),
)


def feature_named(name: str) -> Feature:
    """Return a feature by its name. Raises: KeyError."""
    return {feature.name: feature for feature in FEATURES}[name]


def config_of(*features: Feature, device: str) -> Config:
    """Return the smallest config with these features. If two set the same field, the later wins.

    Args:
        device: layout.device.
    """
    settings = {key: value for feature in features for key, value in feature.settings.items()}
    return build(flatten(Config()) | _BASE | {"layout.device": device} | settings)
