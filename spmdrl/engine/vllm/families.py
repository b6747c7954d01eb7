"""Which models vLLM can run: the arguments that a family needs, what vLLM computes otherwise than
transformers, what it cannot run, and a trial of models that are not named here.

These facts were read in vLLM 0.32's sources and tried with small models.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.engine.vllm.core_loop import CoreLoop
from spmdrl.engine.vllm.images import missing_for_vision, vision_arguments
from spmdrl.engine.vllm.sources import cpu_head_sizes, own_classes
from spmdrl.errors import Refusal
from spmdrl.imports import versions
from spmdrl.model.attention.pick import head_sizes
from spmdrl.model.load import hf_config_of
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.world import is_on_cpu

_DIFFERS: dict[str, Callable[[Any, str], bool]] = {
    "cohere2": lambda config, dtype: True,  # windows are a token longer
    "gemma3n_text": lambda config, dtype: True,  # off by 0.1 nats
    # It has no sliding windows, and always biases of queries, keys and values.
    "qwen2_moe": lambda config, dtype: config.use_sliding_window or not config.qkv_bias,
    "qwen3_moe": lambda config, dtype: config.attention_bias,  # its output projection has no bias
    # It has no biases and clips nothing.
    "olmoe": lambda config, dtype: config.attention_bias or config.clip_qkv is not None,
    "ministral3": lambda config, dtype: True,  # queries do not grow beyond the pretrained length
    "apertus": lambda config, dtype: dtype == "float32",  # its activation is in bfloat16
}
"""{family: whether its class in vLLM 0.32 computes otherwise than transformers' in a dtype}"""
_ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    # By default attention cools with the position only in engines of more than 32768 tokens.
    "llama4_text": lambda config: {
        "override_generation_config": {"attn_temperature_tuning": config.attn_temperature_tuning}
    },
    # Released files have these fields, and those that transformers writes do not.
    "lfm2": lambda config: {
        "hf_overrides": dict.fromkeys(("conv_dim", "block_dim"), config.hidden_size)
    },
    "minimax_m2": lambda config: {
        "hf_overrides": {"rotary_dim": _rotary_dim(config), "scoring_func": "sigmoid"}
        | {"use_routing_bias": True}
    },
    "glm4_moe_lite": lambda config: {
        "hf_overrides": {"first_k_dense_replace": config.mlp_layer_types.count("dense")}
    },
    # transformers' code always has biases; vLLM leaves them out where the config does not say so.
    "glm4v": lambda config: {"hf_overrides": {"text_config": {"attention_bias": True}}},
    # Its router always normalises, and transformers' config has no field for it.
    "qwen3_vl_moe": lambda config: {"hf_overrides": {"text_config": {"norm_topk_prob": True}}},
    "phimoe": lambda config: {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}},
}
"""{family: arguments without which its class in vLLM is not found, or lacks a setting}"""
_DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
_TRIAL_TOKENS = range(3, 12)
_ERROR_CHARS = 400


def _rotary_dim(config: Any) -> int:
    return int(config.rope_parameters.get("partial_rotary_factor", 1.0) * config.head_dim)


def model_arguments(cfg: Config) -> dict[str, Any]:
    """Return the arguments that a family needs; engine.options may replace them.

    Raises: Refusal for a model that vLLM cannot run on these devices, or computes otherwise than
        transformers whatever arguments it gets.
    """
    config = hf_config_of(cfg.model)
    on_cpu = is_on_cpu(cfg)
    family = config.model_type
    if reason := _lacking(config, dtype=cfg.engine.dtype, on_cpu=on_cpu):
        raise Refusal(f"engine.kind: vllm with a {family}: {reason}")
    cache = str(cfg.engine.options.get("kv_cache_dtype", "auto"))
    if on_cpu and cache.startswith("fp8") and (reason := _lacking_for_fp8(config)):
        raise Refusal(
            f"engine.options.kv_cache_dtype: {cache}, and vLLM keeps keys and values in 8 bits on "
            f"the CPU {reason}; leave it out (model.path {cfg.model.path})"
        )
    arguments = vision_arguments(family, on_cpu=on_cpu)
    if on_cpu and getattr(config, "kv_lora_rank", None):
        # On processors with AMX vLLM prefers a backend that packs the projections of latent
        # attention. They could be written neither in place nor by a reload.
        arguments["attention_backend"] = "CPU_MLA"
    if on_cpu and family in ("qwen3_5", "qwen3_5_moe"):
        # vLLM would cache prefixes of their states only with prompts in chunks.
        arguments["enable_prefix_caching"] = False
    if family not in _DIFFERS or not _DIFFERS[family](config, cfg.engine.dtype):
        return arguments | (_ARGUMENTS[family](config) if family in _ARGUMENTS else {})
    if cfg.model.moe.replay or "quantization" in cfg.engine.options:
        raise Refusal(
            f"engine.kind: vllm with a {family}: vLLM's own class for it computes "
            "otherwise than transformers', and its Transformers backend has neither "
            "model.moe.replay nor engine.options quantization; leave these out, or set it to "
            "transformers"
        )
    return arguments | {"model_impl": "transformers"}  # this backend runs transformers' modules


def _lacking(config: Any, *, dtype: str, on_cpu: bool) -> str:
    """Return what vLLM lacks for a model, and what to do; empty where nothing is known."""
    family = config.model_type
    other = "set it to transformers"
    if family == "mamba2" and config.n_groups > 1:
        return (
            f"its n_groups is {config.n_groups}, and vLLM normalises each group of channels by "
            f"itself, transformers all of them together; {other}"
        )
    if family == "jetmoe":
        return (
            "its attention repeats keys and values once per expert of a token, and vLLM's "
            f"Transformers backend pairs them with queries otherwise; {other}"
        )
    if missing := missing_for_vision(family, on_cpu=on_cpu):
        return f"{missing}, or {other}"
    if not on_cpu:
        return ""
    if problem := head_size_problem(config):
        return f"{problem}; {other}"
    if family in ("jamba", "mamba", "falcon_mamba"):
        return f"vLLM's CPU build has no op selective_scan_fwd, of its Mamba layers; {other}"
    if family == "nemotron_h" and "moe" in config.layers_block_type:
        return "vLLM computes experts without a gate (is_act_and_mul=False) on GPUs alone; " + other
    if family == "olmo_hybrid":
        return f"vLLM computes its gated delta nets by Triton kernels, on GPUs alone; {other}"
    if family in _DELTA_NETS and dtype != "bfloat16":
        return (
            f"vLLM's op cpu_gdn_attention_core, of its gated delta nets, computes in bfloat16 "
            f"alone on the CPU, and engine.dtype is {dtype}; set that to bfloat16, or {other}"
        )
    return ""


def head_size_problem(config: Any) -> str:
    """Return why vLLM's attention on the CPU cannot have a model's heads; empty where it can, or
    where vLLM is not installed. On GPUs one of its backends has heads of any size.

    Args:
        config: the transformers config of the whole model, or of its text part.
    """
    known = cpu_head_sizes()
    wrong = [str(size) for size in sorted(head_sizes(config)) if known and size not in known]
    if not wrong:
        return ""
    return (
        f"its attention has heads of {' and '.join(wrong)} elements, and vLLM's on the CPU has "
        f"heads of {', '.join(map(str, known))} alone"
    )


def _lacking_for_fp8(config: Any) -> str:
    """Return what vLLM's 8-bit caches on the CPU need and do not have; empty for nothing."""
    if odd := [str(size) for size in sorted(head_sizes(config)) if size % 32]:
        return f"for heads of multiples of 32 elements alone, and these have {' and '.join(odd)}"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "by AVX-512 or AMX alone, which this processor does not have"
    return ""


def check_mixers(hf_model: Any, mixers: Collection[str], *, repeated: Collection[str] = ()) -> None:
    """Refuse layers that vLLM could only run by its Transformers backend, which cannot run them.

    Args:
        mixers: kinds of layers that mix tokens by code of their own.
        repeated: kinds of attention that attend more than once, of which a cache has one.
    Raises: Refusal where there are some and vLLM has no class of its own for the model.
    """
    name = type(hf_model).__name__
    own = own_classes()
    why = ""
    if mixers:
        why = f"{', '.join(mixers)}, which asks for no attention"
    elif repeated:
        why = (
            f"{', '.join(repeated)}, which attends more than once: its cache has one set of values"
        )
    if why and own and name not in own:
        raise Refusal(
            f"engine.kind: vllm with a {hf_model.config.model_type}: the vLLM that is installed "
            f"has no class {name} of its own, and its Transformers backend cannot run {why}; set "
            "it to transformers"
        )


def check_drafts(
    cfg: Config, *, mixers: Collection[str], states: Collection[str], is_seeing: bool
) -> None:
    """Refuse speculative decoding of models for which its log-probabilities were not compared.

    Args:
        mixers: as for `check_mixers`.
        states: those of them that keep a state.
        is_seeing: the model takes images.
    Raises: Refusal that says what such a model has.
    """
    if not cfg.engine.draft_tokens:
        return
    config = hf_config_of(cfg.model)
    what = _beyond_plain_text(config, mixers=mixers, is_seeing=is_seeing)
    if states:
        what = f"layers with a state ({', '.join(states)}), which draft tokens would change"
    if what:
        raise Refusal(
            f"engine.options.speculative_config: is set with a {config.model_type}, which has "
            f"{what}, and log-probabilities of draft tokens were compared for models of text with "
            "plain attention alone; leave it out"
        )


def check_data_parallel(cfg: Config, *, mixers: Collection[str], is_seeing: bool) -> None:
    """Refuse data-parallel attention in an engine for models that it was not tried with.

    Args:
        mixers, is_seeing: as for `check_drafts`.
    Raises: Refusal that says what such a model has.
    """
    if cfg.layout.inference_dp == 1:
        return
    config = hf_config_of(cfg.model)
    if what := _beyond_plain_text(config, mixers=mixers, is_seeing=is_seeing):
        raise Refusal(
            f"layout.inference_dp: {cfg.layout.inference_dp} with a {config.model_type}, which has "
            f"{what}; it was tried with models of text with plain attention alone; set it to 1"
        )


def _beyond_plain_text(config: Any, *, mixers: Collection[str], is_seeing: bool) -> str:
    """Return what a model has beside text and plain attention; empty if nothing."""
    if mixers:
        return f"layers that compute by code of their own ({', '.join(mixers)})"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention"
    return "images" if is_seeing else ""


# --------------------------------------------------------------------------- a trial


@contextlib.contextmanager
def refusing_models(cfg: Config) -> Iterator[None]:
    """Turn what vLLM raises about a model into a Refusal that names the model and says what to do.

    An error that says that memory is short is raised as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any library and kind
        config = hf_config_of(cfg.model)
        why = _describe(error, config.architectures or ())
        hint = "set engine.kind to transformers, which runs every model that is trained here"
        if "bf16" in why.lower() and cfg.engine.dtype != "bfloat16":
            hint = "set engine.dtype to bfloat16, or engine.kind to transformers"
        options = f" with engine.options {dict(cfg.engine.options)}" if cfg.engine.options else ""
        raise Refusal(
            f"engine.kind: vllm, and vLLM {versions().get('vllm', 'of an unknown version')} cannot "
            f"run {cfg.model.path} "
            f"({config.model_type}) in {cfg.engine.dtype} here{options}: {why}; {hint}"
        ) from error


def try_engine(loop: CoreLoop, *, params: Any) -> None:
    """Score and continue a few tokens: a kernel that a build lacks is missed only when it runs.

    Args:
        params: of a request that scores its prompt and draws at least one token.
    Raises: whatever a kernel raises, or its absence.
    """
    trial = loop.validate({"prompt_token_ids": [*_TRIAL_TOKENS]}, params, lora=None)
    for part in range(loop.parts):
        loop.add(f"trial {part}", trial, seed=None)
    while loop.unfinished:
        loop.step()


def _describe(error: Exception, architectures: Sequence[str]) -> str:
    """Return what went wrong, in one line."""
    if "failed to be inspected" in str(error):
        from vllm import ModelRegistry

        for name in architectures:
            try:
                ModelRegistry.models[name].load_model_cls()
            except Exception as cause:  # of imports
                return f"its module for {name} cannot be imported ({first_line(cause)})"
    lines = [line.strip() for line in str(error).splitlines() if "further information" not in line]
    text = " ".join(lines).partition(" [type=")[0][:_ERROR_CHARS]
    frames = traceback.extract_tb(error.__traceback__)
    place = "an unknown place"
    if frames:
        place = f"{frames[-1].filename.rpartition('site-packages/')[2]}:{frames[-1].lineno}"
    return f"{type(error).__name__}: {text or '(no text)'} at {place}"
