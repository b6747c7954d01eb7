"""Whether values are in range, each by itself."""

from __future__ import annotations

import math
from typing import Any

from spmdrl.config.fields import Config
from spmdrl.config.tree import flatten
from spmdrl.data.tasks import is_generated

_AT_LEAST = {
    "steps": 1,
    "lag": 0,
    "batch.prompts_per_step": 1,
    "batch.group_size": 1,
    "batch.tokens_per_microbatch": 0,
    "batch.updates_per_step": 1,
    "data.size": 0,
    "data.eval_size": 0,
    "data.max_prompt_tokens": 1,
    "sampling.max_response_tokens": 1,
    "optimizer.max_grad_norm": 0,
    "optimizer.lr": 0,
    "optimizer.warmup_steps": 0,
    "critic.lr": 0,
    "critic.warmup_steps": 0,
    "critic.clip": 0,
    "engine.max_num_seqs": 1,
    "engine.max_batched_tokens": 1,
    "model.lora.rank": 0,
    "model.memory.head_chunk_tokens": 0,
    "model.memory.prefetch": 0,
    "model.reference.sync_every": 0,
    "stream.bucket_bytes": 1024,
    "stream.verify_every": 0,
    "rewards.workers": 1,
    "rewards.shaping.overlong_tokens": 0,
    "rewards.shaping.overlong_penalty": 0,
    "rewards.shaping.truncated_penalty": 0,
    "rollout.record.every": 0,
    "rollout.schedule.over_sample": 1,
    "rollout.schedule.max_staleness": 0,
    "rollout.schedule.dynamic": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep.last": 1,
    "evaluate.every_steps": 0,
    "evaluate.samples": 1,
    "evaluate.temperature": 0,
    "report.console.table_every": 1,
    "report.console.samples_every": 0,
    "algorithm.kl_coef": 0,
    "algorithm.kl_control.target": 0,
    "algorithm.kl_control.horizon": 0,
    "algorithm.entropy_control.target": 0,
    "algorithm.entropy_control.delta": 0,
    "algorithm.entropy_control.lower": 0,
    "layout.wait_timeout_s": 1,
    "layout.startup_timeout_s": 1,
}
_ABOVE_0 = ("optimizer.eps", "model.lora.alpha", "model.moe.coef", "model.moe.rate")
_WITHIN = {
    "(0, 1)": ("engine.gpu_memory_frac",),
    "[0, 1)": ("optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay"),
    "(0, 1]": (
        "algorithm.entropy_control.keep_frac",
        "model.reference.sync_mix",
        "rollout.schedule.curriculum",
    ),
    "[0, 1]": ("optimizer.min_lr_frac", "rewards.shaping.truncated_factor"),
}


def range_problems(cfg: Config) -> list[str]:
    """Return which values are out of range, each as `field: what, value seen`."""
    flat, problems = flatten(cfg), []
    for name, low in _AT_LEAST.items():
        value = flat[name]
        if value != "auto" and not low <= value < math.inf:
            finite = " and finite" if value == math.inf else ""
            problems.append(f"{name}: must be at least {low}{finite}, got {value}")
    for name in _ABOVE_0:
        if not 0 < flat[name] < math.inf:
            problems.append(f"{name}: must be above 0 and finite, got {flat[name]}")
    for interval, names in _WITHIN.items():
        problems += [
            f"{name}: must be in {interval}, got {flat[name]}"
            for name in names
            if not _is_in(flat[name], interval)
        ]
    return problems + _data_problems(cfg, flat)


def _is_in(value: float, interval: str) -> bool:
    above = value > 0 if interval[0] == "(" else value >= 0
    return above and (value < 1 if interval[-1] == ")" else value <= 1)


def _data_problems(cfg: Config, flat: dict[str, Any]) -> list[str]:
    problems = []
    if not cfg.sampling.temperature > 0:
        problems.append(
            f"sampling.temperature: must be above 0, got {cfg.sampling.temperature}; greedy "
            "samples of one prompt are all the same and carry no signal"
        )
    for name in ("model.path", "data.train"):
        if not flat[name]:
            problems.append(f"{name}: is required and empty")
    if is_generated(cfg.data.train) and not cfg.data.size:
        problems.append(
            f"data.size: a generated task ({cfg.data.train}) has no size of its own; "
            "set how many problems to make"
        )
    longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
    budget = cfg.batch.tokens_per_microbatch  # 0: found at start, no less than it must be
    if budget and cfg.objective.samples and budget < longest:
        problems.append(
            f"batch.tokens_per_microbatch: {budget} is below "
            f"data.max_prompt_tokens {cfg.data.max_prompt_tokens} + "
            f"sampling.max_response_tokens {cfg.sampling.max_response_tokens} = {longest}, so "
            "one sequence may not fit; raise it or lower those"
        )
    if budget and cfg.objective.trains_on_pairs and budget < 2 * longest:
        problems.append(
            f"batch.tokens_per_microbatch: {budget} is below 2 * "
            f"(data.max_prompt_tokens {cfg.data.max_prompt_tokens} + sampling.max_response_tokens "
            f"{cfg.sampling.max_response_tokens}) = {2 * longest}, so one pair, which stays "
            "together, may not fit; raise it or lower those"
        )
    if cfg.evaluate.every_steps and not cfg.data.eval:
        problems.append(
            f"evaluate.every_steps: {cfg.evaluate.every_steps}, but data.eval is "
            "empty; name held-out rows"
        )
    return problems
