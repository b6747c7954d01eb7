"""The arguments that vLLM's engine is built with: what this program needs, and engine.options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spmdrl.config import Config
from spmdrl.engine.vllm_adapter import lora_arguments
from spmdrl.engine.vllm_routes import route_arguments
from spmdrl.engine.vllm_sampling_masks import kept_arguments

log = logging.getLogger(__name__)


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
    options = cfg.engine.options
    kernels = cfg.engine.options.get("kernel_config")
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
    longest = cfg.longest_sequence
    tokens_per_step = max(cfg.engine.max_batched_tokens, cfg.engine.max_num_seqs)
    own: dict[str, Any] = dict(
        model=cfg.model.path,
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
    if cfg.model.moe.replay:
        own |= route_arguments(on_cpu=on_cpu)
    if cfg.sampling.truncates:
        own |= kept_arguments(on_cpu=on_cpu)
    return own
