"""Mappings of options that belong to no method: of the optimizer, the reference, vLLM's engine."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdrl.check.lora import lora_problems
from spmdrl.check.moe import moe_problems
from spmdrl.config.fields import Config
from spmdrl.imports import nearest

ADAMW: dict[str, float] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
"""What optimizer.options may hold, with the defaults."""
LEARNING_RATE: dict[str, float] = {"warmup_steps": 0, "min_lr_frac": 0.1}
"""What optimizer.schedule_options may hold, with the defaults."""
REFERENCE: dict[str, Any] = {"sync_every": 0, "sync_mix": 1.0, "cache": False}
"""What model.reference_options may hold, with the values that change nothing."""
KERNELS: dict[str, Any] = {"attention": "auto", "context": "auto", "liger": True, "compile": False}
"""What model.kernels may hold, with the defaults."""
MEMORY: dict[str, Any] = {
    "activation_checkpointing": "none",
    "head_chunk_tokens": 0,
    "offload": "none",
    "master_dtype": "float32",
    "optimizer_dtype": "float32",
    "reshard": "auto",
    "reduce": "each",
    "prefetch": "auto",
}
"""What model.memory may hold, with the defaults."""
CRITIC: dict[str, float] = {"clip": 0.0, "warmup_steps": 0}
"""What critic.options may hold, with the defaults."""
MLFLOW: dict[str, str] = {"uri": "", "experiment": "spmdrl"}
"""Defaults of report.mlflow, which may hold run_name besides; no uri: a file in output_dir."""
CONSOLE: dict[str, int] = {"table_every": 5, "samples_every": 0}
"""What report.console may hold, with the defaults."""
RECORD = ("every", "replay")
"""What rollout.record may hold."""
ENGINE_ARGUMENTS: dict[str, str] = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "dtype": "engine.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "tensor_parallel_size": "layout.inference_tp",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_batched_tokens",
    "gpu_memory_utilization": "engine.gpu_memory_frac",
    "kv_cache_memory_bytes": "engine.cpu_kv_cache_gib",
    "max_model_len": "data.max_prompt_tokens + sampling.max_response_tokens",
    "distributed_executor_backend": "",
    "logprobs_mode": "",
    "skip_tokenizer_init": "",
    "async_scheduling": "rollout.schedule",
    "disable_log_stats": "",
    "use_tqdm_on_load": "",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora",
    "max_loras": "",
    "max_cpu_loras": "",
    "lora_target_modules": "model.lora",
    "lora_dtype": "engine.dtype",
    "load_format": "",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
}
"""Arguments of vLLM's engine that are set here, with the field that does it. Where there is none
they must be what they are: the engine lives in this process and gets its weights from the
trainers, in tokens and logprobs of the distribution that was sampled."""


def option_problems(cfg: Config) -> list[str]:
    """Return what is wrong with these mappings, each as `field: what, value seen`."""
    return [
        *_model_problems(cfg),
        *_critic_problems(cfg),
        *_adamw_problems(cfg),
        *_learning_rate_problems(cfg),
        *_engine_problems(cfg),
        *_reference_problems(cfg),
        *_schedule_problems(cfg),
        *_mlflow_problems(cfg),
        *_console_problems(cfg),
        *_record_problems(cfg),
        *_keep_problems(cfg),
        *lora_problems(cfg),
        *moe_problems(cfg),
    ]


def _model_problems(cfg: Config) -> list[str]:
    choices = {
        "attention": ("auto", "varlen", "flash", "padded"),
        "context": ("auto", "ulysses", "gather", "ring"),
        "liger": (True, False),
        "compile": (True, False),
        "activation_checkpointing": ("none", "selective", "full"),
        "offload": ("none", "activations", "optimizer", "all", "parameters"),
        "master_dtype": ("float32", "bfloat16"),
        "optimizer_dtype": ("float32", "bfloat16", "int8"),
        "reshard": ("auto", "always", "never"),
        "reduce": ("each", "last"),
    }
    problems = []
    for field, known in (("kernels", KERNELS), ("memory", MEMORY)):
        for name, value in getattr(cfg.model, field).items():
            place = f"model.{field}.{name}"
            if name not in known:
                problems.append(f"{place}: unknown option{nearest(name, known)}")
            elif name in choices and value not in choices[name]:
                these = ", ".join(str(c).lower() for c in choices[name])
                problems.append(f"{place}: expected one of {these}; got {value!r}")
            elif name == "head_chunk_tokens" and (type(value) is not int or value < 0):
                problems.append(f"{place}: expected a number of positions, or 0; got {value!r}")
            elif name == "prefetch" and value != "auto" and (type(value) is not int or value < 0):
                problems.append(f"{place}: expected a number of blocks, or auto; got {value!r}")
    if (
        cfg.model.memory.get("optimizer_dtype") == "int8"
        and importlib.util.find_spec("torchao") is None
    ):
        problems.append(
            "model.memory.optimizer_dtype: int8 takes its quantisation from torchao, "
            "which is not installed: pip install --no-deps torchao==0.18.0"
        )
    if cfg.model.lora and cfg.model.memory.get("offload") == "parameters":
        problems.append(
            "model.memory.offload: parameters with model.lora, whose adapters are "
            "small and merged on the device for every push; take optimizer or "
            "activations"
        )
    if cfg.model.lora and cfg.model.memory.get("master_dtype") == "bfloat16":
        problems.append(
            "model.memory.master_dtype: bfloat16 with model.lora, whose adapters stay "
            "float32 and whose frozen weights are in model.compute_dtype; leave it out"
        )
    return problems


def _critic_problems(cfg: Config) -> list[str]:
    problems = []
    for name, value in cfg.critic.options.items():
        place = f"critic.options.{name}"
        if name not in CRITIC:
            problems.append(f"{place}: unknown option{nearest(name, CRITIC)}")
        elif name == "clip" and not (_is_number(value) and value >= 0):
            problems.append(f"{place}: expected a number, 0 or more, got {value!r}")
        elif name == "warmup_steps" and (type(value) is not int or value < 0):
            problems.append(f"{place}: expected a number of steps, 0 or more, got {value!r}")
    return problems


def _adamw_problems(cfg: Config) -> list[str]:
    options, problems = cfg.optimizer.options, []
    for name, value in options.items():
        place = f"optimizer.options.{name}"
        if name not in ADAMW:
            problems.append(f"{place}: unknown option of AdamW{nearest(name, ADAMW)}")
        elif not _is_number(value):
            problems.append(f"{place}: expected a number, got {value!r}")
        elif name == "eps" and not 0 < value < math.inf:
            problems.append(f"{place}: must be above 0, got {value}")
        elif name != "eps" and not 0 <= value < 1:
            problems.append(f"{place}: must be in [0, 1), got {value}")
    return problems


def _learning_rate_problems(cfg: Config) -> list[str]:
    options, problems = cfg.optimizer.schedule_options, []
    for name, value in options.items():
        place = f"optimizer.schedule_options.{name}"
        if name not in LEARNING_RATE:
            problems.append(f"{place}: unknown option{nearest(name, LEARNING_RATE)}")
        elif name == "warmup_steps" and (type(value) is not int or value < 0):
            problems.append(f"{place}: expected a number of steps, 0 or more, got {value!r}")
        elif name == "min_lr_frac" and not (_is_number(value) and 0 <= value <= 1):
            problems.append(f"{place}: expected a fraction from 0 to 1, got {value!r}")
    return problems


# --------------------------------------------------------------------------- vLLM


def _engine_problems(cfg: Config) -> list[str]:
    if cfg.engine.kind == "transformers":
        return [
            f"engine.options.{name}: is an argument of vLLM's engine, and engine.kind is "
            "transformers, which has none; take it out"
            for name in cfg.engine.options
        ]
    problems, known = [], engine_argument_names() if cfg.engine.options else ()
    for name in cfg.engine.options:
        place = f"engine.options.{name}"
        if name in ENGINE_ARGUMENTS:
            field = ENGINE_ARGUMENTS[name]
            problems.append(
                f"{place}: is set by {field}; change that"
                if field
                else f"{place}: cannot be changed, since the engine lives inside this job"
            )
        elif known and name not in known:
            free = [n for n in known if n not in ENGINE_ARGUMENTS]
            near = difflib.get_close_matches(name, free, n=1, cutoff=0.5)
            guess = f"; did you mean {near[0]}?" if near else "; see `vllm serve --help`"
            problems.append(
                f"{place}: the vLLM that is installed has no such engine argument{guess}"
            )
    return problems


def engine_argument_names() -> tuple[str, ...]:
    """Return the names of vLLM's EngineArgs; () where vLLM is not installed.

    Read from its source: to import vLLM takes seconds and sets up what the engine, when it is
    built, has to set up in its own way.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return ()
    tree = ast.parse(Path(found.origin).with_name("engine").joinpath("arg_utils.py").read_text())
    return tuple(
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
    )


# --------------------------------------------------------------------------- the reference


def _reference_problems(cfg: Config) -> list[str]:
    options = cfg.model.reference_options
    problems = [
        f"{name}: unknown option{nearest(name, REFERENCE)}"
        for name in options
        if name not in REFERENCE
    ]
    if not problems:
        problems = _value_problems(REFERENCE | options, options)
    if not problems and any((REFERENCE | options)[name] for name in ("sync_every", "cache")):
        problems = _use_problems(cfg)
    return [f"model.reference_options.{problem}" for problem in problems]


def _value_problems(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    every, mix, cache = chosen["sync_every"], chosen["sync_mix"], chosen["cache"]
    problems = []
    if type(every) is not int or every < 0:
        problems.append(f"sync_every: expected a number of steps, 1 or more, got {every!r}")
    if not _is_number(mix) or not 0 < mix <= 1:
        problems.append(f"sync_mix: must be in (0, 1], the policy's share, got {mix!r}")
    if not isinstance(cache, (bool, str)) or cache == "":
        problems.append(f"cache: expected true, false or a folder, got {cache!r}")
    if problems:
        return problems
    if "sync_mix" in given and not every:
        problems.append(f"sync_mix: {mix} without sync_every, the steps between two syncs")
    if every and cache:
        problems.append(
            f"cache: {cache!r} with sync_every {every}: the logprobs of a reference "
            "that changes cannot be kept; leave one of them out"
        )
    return problems


def _use_problems(cfg: Config) -> list[str]:
    """Return what is wrong with options that are right by themselves."""
    from spmdrl.data.examples import row_kind
    from spmdrl.train.objectives.pairs import PairObjective
    from spmdrl.train.objectives.rl import needed_columns

    chosen, cached = cfg.algorithm, cfg.model.reference_options.get("cache")
    objective = cfg.objective
    try:
        columns = PairObjective(cfg).columns if objective.trains_on_pairs else needed_columns(cfg)
        row = row_kind(cfg)
    except ValueError:
        return []  # an unknown method, which is reported as such
    name = "cache" if cached else "sync_every"
    if cached and objective.samples:
        return [
            "cache: with the objective rl, whose responses are sampled anew in every step: "
            "there are no rows to look up; leave it out"
        ]
    if "ref_logprobs" not in columns:
        used = f"the objective {chosen.objective}"
        if objective.samples:
            used = f"kl_coef {chosen.kl_coef}"
        elif objective.trains_on_pairs:
            used = f"the loss {chosen.loss}"
        return [f"{name}: {used} uses no reference; leave it out"]
    if cached and row == "label":
        return [
            f"cache: the loss {chosen.loss} puts each response to another prompt of its step "
            "for the KL, other pairs in every epoch: there are no fixed rows whose logprobs "
            "could be kept; leave it out"
        ]
    return []


# --------------------------------------------------------------------------- the rest


def _schedule_problems(cfg: Config) -> list[str]:
    from spmdrl.rollout.schedule import schedule_problems

    return [f"rollout.schedule.{problem}" for problem in schedule_problems(cfg)]


def _keep_problems(cfg: Config) -> list[str]:
    from spmdrl.checkpoint.keep import keep_problems

    return [f"checkpoint.keep.{problem}" for problem in keep_problems(cfg)]


def _mlflow_problems(cfg: Config) -> list[str]:
    known = (*MLFLOW, "run_name")
    return [
        f"report.mlflow.{name}: unknown option{nearest(name, known)}"
        for name in cfg.report.mlflow
        if name not in known
    ]


def _console_problems(cfg: Config) -> list[str]:
    problems = []
    for name, value in cfg.report.console.items():
        least = 1 if name == "table_every" else 0
        if name not in CONSOLE:
            problems.append(f"report.console.{name}: unknown option{nearest(name, CONSOLE)}")
        elif type(value) is not int or value < least:
            problems.append(
                f"report.console.{name}: expected a number of steps, {least} or more, got {value!r}"
            )
    return problems


def _record_problems(cfg: Config) -> list[str]:
    options, problems = cfg.rollout.record, []
    problems += [
        f"{name}: unknown option{nearest(name, RECORD)}" for name in options if name not in RECORD
    ]
    every, folder = options.get("every", 1), options.get("replay", "runs")
    if type(every) is not int or every < 1:
        problems.append(
            f"every: expected a number of steps, 1 or more, got {every!r}; to record "
            "none, leave it out"
        )
    if not isinstance(folder, str) or not folder:
        problems.append(f"replay: expected a run's output_dir or a folder, got {folder!r}")
    if not problems and options and not cfg.objective.samples:
        problems.append(
            f"{next(iter(options))}: the objective {cfg.algorithm.objective} samples "
            "nothing; leave it out"
        )
    if not problems and len(options) == 2:
        problems.append(
            f"every: {every} with replay {folder}, which samples nothing new to "
            "record; leave one of them out"
        )
    if (
        not problems
        and "replay" in options
        and Path(cfg.output_dir).resolve()
        in (Path(folder).resolve(), Path(folder).resolve().parent)
    ):
        problems.append(
            f"replay: {folder} is of this very output_dir, whose checkpoints and "
            "metrics are of the recorded run; set another output_dir"
        )
    return [f"rollout.record.{problem}" for problem in problems]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
