"""What vLLM makes of families: what it is told, what it computes otherwise, what it cannot run.

Read off vLLM 0.32's sources and tried with small models; a model that is not named here is tried
when its engine is built (vllm_trial.py).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.model.load import hf_config_of
from spmdrl.model.multimodal import missing_for_vision, vision_arguments
from spmdrl.world.world import is_on_cpu

_BACKEND = {"model_impl": "transformers"}  # vLLM's own, which runs transformers' modules
_OTHERWISE: dict[str, Callable[[Any, str], bool]] = {
    "cohere2": lambda config, dtype: True,  # windows are a token longer
    "gemma3n_text": lambda config, dtype: True,  # off by 0.1 nats
    "qwen2_moe": lambda config, dtype: config.use_sliding_window,  # which it leaves out
    "ministral3": lambda config, dtype: True,  # queries do not grow beyond the pretrained length
    "apertus": lambda config, dtype: dtype == "float32",  # its activation is in bfloat16
}
"""{family: whether its class in vLLM 0.32 computes otherwise than transformers' in a dtype}"""
_TOLD: dict[str, Callable[[Any], dict[str, Any]]] = {
    # Else attention cools with the position in engines of more than 32768 tokens alone.
    "llama4_text": lambda config: {
        "override_generation_config": {"attn_temperature_tuning": config.attn_temperature_tuning}
    },
    # Fields that released files have, and those that transformers writes have not.
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
    # Of its router, which transformers' config has no field for: it always does.
    "qwen3_vl_moe": lambda config: {"hf_overrides": {"text_config": {"norm_topk_prob": True}}},
    "phimoe": lambda config: {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}},
}
"""{family: arguments without which its class in vLLM is not found, or lacks a setting}"""


def _rotary_dim(config: Any) -> int:
    return int(config.rope_parameters.get("partial_rotary_factor", 1.0) * config.head_dim)


def model_arguments(cfg: Config) -> dict[str, Any]:
    """Return the arguments that a family needs where engine.options says nothing else.

    Raises: Refusal for a model that vLLM computes otherwise than transformers, whatever it is
        told, or that it cannot run on these devices.
    """
    config = hf_config_of(cfg.model)
    family = config.model_type
    if reason := _lacking(config, dtype=cfg.engine.dtype, on_cpu=is_on_cpu(cfg)):
        raise Refusal(f"engine.kind: vllm with a {family}: {reason}")
    cache = str(cfg.engine.options.get("kv_cache_dtype", "auto"))
    if is_on_cpu(cfg) and cache.startswith("fp8") and (reason := _lacking_for_fp8(config)):
        raise Refusal(
            f"engine.options.kv_cache_dtype: {cache}, and vLLM keeps keys and values in 8 bits on "
            f"the CPU {reason}; leave it out (model.path {cfg.model.path})"
        )
    seeing = vision_arguments(family, on_cpu=is_on_cpu(cfg))
    differs = _OTHERWISE.get(family, lambda config, dtype: False)
    if not differs(config, cfg.engine.dtype):
        return seeing | _TOLD.get(family, lambda config: {})(config)
    if cfg.model.moe.replay or "quantization" in cfg.engine.options:
        raise Refusal(
            f"engine.kind: vllm with a {family}: vLLM's own class for it computes "
            "otherwise than transformers', and its Transformers backend has neither "
            "model.moe.replay nor engine.options quantization; leave these out, or set it to "
            "transformers"
        )
    return seeing | _BACKEND


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
    if wrong := head_size_problem(config):
        return f"{wrong}; {other}"
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
    wrong = [str(size) for size in sorted(_head_sizes(config)) if known and size not in known]
    if not wrong:
        return ""
    return (
        f"its attention has heads of {' and '.join(wrong)} elements, and vLLM's on the CPU has "
        f"heads of {', '.join(map(str, known))} alone"
    )


def _lacking_for_fp8(config: Any) -> str:
    """Return what vLLM's rule for 8-bit caches on the CPU misses; empty where it is kept."""
    if odd := [str(size) for size in sorted(_head_sizes(config)) if size % 32]:
        return f"for heads of multiples of 32 elements alone, and these have {' and '.join(odd)}"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "by AVX-512 or AMX alone, which this processor has not"
    return ""


def _head_sizes(config: Any) -> set[int]:
    """Return the elements of the heads of softmax attention, those of single layers too; none of
    latent attention, whose heads are made otherwise, and of models without attention."""
    text = config.get_text_config()
    fields = text.to_dict()
    fields |= {name: fields.get(other) for name, other in text.attribute_map.items()}
    heads = fields.get("num_attention_heads")
    hidden = fields.get("hidden_size")
    if not isinstance(heads, int) or not heads or fields.get("kv_lora_rank"):
        return set()
    sizes = {fields.get("head_dim") or hidden // heads, fields.get("global_head_dim")}
    own_layers = (fields.get("per_layer_config") or {}).values()
    sizes |= {layer.get("head_dim") for layer in own_layers}
    return {size for size in sizes if size}


@cache
def cpu_head_sizes() -> tuple[int, ...]:
    """Return the sizes of heads that vLLM's attention on the CPU has; () where vLLM is not
    installed, or says so otherwise. Read from its source, as `own_classes` is."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return ()
    path = Path(found.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            (sizes,) = (line.value for line in node.body if isinstance(line, ast.Return))
            return tuple(ast.literal_eval(ast.unparse(sizes))) if sizes else ()
    return ()


_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def check_mixers(hf_model: Any, mixers: Collection[str]) -> None:
    """Refuse layers that vLLM would have to run by its Transformers backend, which cannot.

    Args:
        mixers: kinds of layers that mix tokens otherwise than by softmax attention.
    Raises: Refusal where there are some and vLLM has no class of its own for the model.
    """
    name = type(hf_model).__name__
    own = own_classes()
    if mixers and own and name not in own:
        raise Refusal(
            f"engine.kind: vllm with a {hf_model.config.model_type}: the vLLM that is installed "
            f"has no class {name} of its own, and its Transformers backend cannot run "
            f"{', '.join(mixers)}, which asks for no attention; set it to transformers"
        )


@cache
def own_classes() -> frozenset[str]:
    """Return the names of transformers' classes that vLLM has classes of its own for; empty where
    vLLM is not installed, or says so otherwise.

    Read from its source: to import vLLM takes seconds and sets up much.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    path = Path(found.origin).parent / "model_executor" / "models" / "registry.py"
    tables = [
        node.value
        for node in (ast.parse(path.read_text()).body if path.is_file() else [])
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict)
    ]
    return frozenset(
        str(key.value)
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant)
        and isinstance(value, ast.Tuple)
        and ast.unparse(value.elts[0]) != "'transformers'"
    )
