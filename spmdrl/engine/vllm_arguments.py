"""The arguments that vLLM's engine is built with: what this program needs, and engine.options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from spmdrl.config import Config
from spmdrl.engine.vllm_adapter import lora_arguments
from spmdrl.engine.vllm_routes import route_arguments
from spmdrl.errors import Refusal
from spmdrl.model.load import load_hf_config

log = logging.getLogger(__name__)

_BACKEND = {"model_impl": "transformers"}  # vLLM's own, which runs transformers' modules
_OTHERWISE: dict[str, Callable[[Any, str], bool]] = {
    "cohere2": lambda config, dtype: True,  # windows are a token longer
    "gemma3n_text": lambda config, dtype: True,  # off by 0.1 nats
    "ernie4_5_moe": lambda config, dtype: True,  # off by 0.5 nats
    "qwen2_moe": lambda config, dtype: config.use_sliding_window,  # which it leaves out
    "ministral3": lambda config, dtype: True,  # queries do not grow beyond the pretrained length
    "apertus": lambda config, dtype: dtype == "float32",  # its activation is in bfloat16
}
"""{family: whether its class in vLLM 0.32 computes otherwise than transformers' in a dtype}"""


def model_arguments(cfg: Config) -> dict[str, Any]:
    """Return the arguments that a family needs where engine.options says nothing else.

    Raises: Refusal for a model that vLLM computes otherwise than transformers, whatever it is
        told.
    """
    model = cfg.model
    trusts, part = model.trust_remote_code, model.part
    config = load_hf_config(model.path, trust_remote_code=trusts, part=part)
    _check_rotary(config, longest=longest_sequence(cfg))
    if config.model_type == "mamba2" and config.n_groups > 1:
        raise Refusal(
            f"engine.kind: vllm with a mamba2 of n_groups {config.n_groups}: vLLM normalises each "
            "group of channels by itself, transformers all of them together; set it to transformers"
        )
    if config.model_type == "llama4_text":
        # Else attention cools with the position in engines of more than 32768 tokens alone.
        cools = {"attn_temperature_tuning": config.attn_temperature_tuning}
        return {"override_generation_config": cools}
    differs = _OTHERWISE.get(config.model_type, lambda config, dtype: False)
    if not differs(config, cfg.engine.dtype):
        return {}
    if cfg.model.moe.replay or "quantization" in cfg.engine.options:
        raise Refusal(
            f"engine.kind: vllm with a {config.model_type}: vLLM's own class for it computes "
            "otherwise than transformers', and its Transformers backend has neither "
            "model.moe.replay nor engine.options quantization; leave these out, or set it to "
            "transformers"
        )
    return _BACKEND


def longest_sequence(cfg: Config) -> int:
    """Return the tokens of the longest sequence that an engine is asked for."""
    return cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens


def _check_rotary(config: Any, *, longest: int) -> None:
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") != "longrope":
        return
    name = "original_max_position_embeddings"
    short: int = rotary.get(name) or getattr(config, name, None) or longest
    if longest > short:
        raise Refusal(
            f"data.max_prompt_tokens + sampling.max_response_tokens: {longest}, and {short} tokens "
            f"is where the rotary factors of this {config.model_type} change: vLLM takes the long "
            "ones for every sequence then, transformers for longer ones alone. Let the two be at "
            f"most {short}, or set engine.kind to transformers"
        )


def engine_arguments(cfg: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return them by their names in vLLM's EngineArgs.

    What engine.options may not hold is refused in check/engine_options.py.
    """
    if cfg.layout.roles.shares_devices and on_cpu:
        log.info(
            "vLLM has no sleep mode on the CPU: its KV cache, engine.cpu_kv_cache_gib %g, "
            "stays during updates",
            cfg.engine.cpu_kv_cache_gib,
        )
    options = _defaults(cfg, on_cpu=on_cpu) | cfg.engine.options
    if on_cpu:
        # A prompt computed in parts has the draw behind each part but the last taken back, and
        # vLLM cannot take back that of a seeded request here: CPU generators have no offset.
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
    return dict(**lora_arguments(cfg), **_own_arguments(cfg, on_cpu=on_cpu), **options)


def _defaults(cfg: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return what holds where engine.options says nothing else."""
    if on_cpu:
        return {"enable_sleep_mode": False}
    shared: dict[str, Any] = {"enable_sleep_mode": cfg.layout.roles.shares_devices}
    options, kernels = cfg.engine.options, cfg.engine.options.get("kernel_config")
    said = {*options, *(kernels if isinstance(kernels, Mapping) else ())}
    if "enable_flashinfer_autotune" not in said:
        # It waits in a group of all ranks, where trainers never come.
        shared |= {"enable_flashinfer_autotune": False}
    if not {"moe_backend", "quantization"} & said:
        # Others may shuffle the experts' weights as they load, so that none is written in place.
        shared |= {"moe_backend": "triton"}
    return shared


def _own_arguments(cfg: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that engine.options may not hold."""
    longest = longest_sequence(cfg)
    tokens_per_step = max(cfg.engine.max_batched_tokens, cfg.engine.max_num_seqs)
    recorded = route_arguments(on_cpu=on_cpu) if cfg.model.moe.replay else {}
    return (
        dict(
            model=cfg.model.path,
            skip_tokenizer_init=True,  # token ids in, token ids out
            trust_remote_code=cfg.model.trust_remote_code,
            dtype=cfg.engine.dtype,
            seed=cfg.seed,
            tensor_parallel_size=cfg.layout.inference_tp,
            max_model_len=longest,
            max_num_seqs=cfg.engine.max_num_seqs,
            # On the CPU no prompt is computed in parts: a step must hold one whole.
            max_num_batched_tokens=max(tokens_per_step, longest) if on_cpu else tokens_per_step,
            gpu_memory_utilization=cfg.engine.gpu_memory_frac,
            kv_cache_memory_bytes=int(cfg.engine.cpu_kv_cache_gib * 2**30) if on_cpu else None,
            # With it a step is under way while its predecessor's tokens are handed out, and weights
            # could not be exchanged between two steps.
            async_scheduling=None if cfg.rollout.schedule.is_plain else False,
            logprobs_mode="processed_logprobs",  # of the distribution sampled from
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        | recorded
    )
