"""Arguments of vLLM's engine by engine.options: which exist, and which are set by other fields."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path

from spmdrl.config.fields import Config

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
    "enable_lora": "model.lora.push",
    "max_lora_rank": "model.lora.rank",
    "max_loras": "",
    "max_cpu_loras": "",
    "lora_target_modules": "model.lora.targets",
    "lora_dtype": "engine.dtype",
    "load_format": "",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
}
"""Arguments of vLLM's engine that are set here, with the field that does it. Where there is none
they must be what they are: the engine lives in this process and gets its weights from the
trainers, in tokens and logprobs of the distribution that was sampled."""


def engine_option_problems(cfg: Config) -> list[str]:
    """Return what is wrong with engine.options, each as `field: what, value seen`."""
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
