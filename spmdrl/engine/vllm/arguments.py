"""The arguments that vLLM's engine is built with.

Trainers send the plain weights of a text model under the names of released files. Where the files
at model.path hold quantised weights, vision towers or other names, vLLM is not told of these: a
loader of ours gives it the tensors that trainers load, under their names, dequantised one by one
(model/files/quantised.py, model/files/reader.py). What vLLM makes of them after loading, and so the
proof of layout, is that of a plain folder. This uses vLLM's documented register_model_loader, and
get_all_weights of its default loader (0.32).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from spmdrl.config import Config
from spmdrl.engine.vllm.adapter import lora_arguments
from spmdrl.model.files.quantised import QUANTISATION_KEYS, quantisation
from spmdrl.model.files.reader import CheckpointReader, TextPart, text_config, text_part
from spmdrl.model.load import model_folder
from spmdrl.model.transformers_internals import has_towers

log = logging.getLogger(__name__)

_FORMAT = "spmdrl_plain"


def engine_arguments(cfg: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return arguments by their names in vLLM's EngineArgs, with those of engine.options.

    check/engine_options.py refuses the options that are set here.
    """
    if cfg.layout.roles.shares_devices and on_cpu:
        log.info(
            "vLLM has no sleep mode on the CPU: its KV cache, engine.cpu_kv_cache_gib %g, "
            "stays during updates",
            cfg.engine.cpu_kv_cache_gib,
        )
    options = _defaults(cfg, on_cpu=on_cpu) | cfg.engine.options
    if on_cpu:
        # When a prompt is computed in chunks, vLLM takes back the draw after each chunk but the
        # last. It cannot do so for a seeded request here: CPU generators have no offset.
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
    if cfg.engine.draft_tokens:
        options |= _draft_arguments(cfg)
    return dict(**lora_arguments(cfg), **_own_arguments(cfg, on_cpu=on_cpu), **options)


def _defaults(cfg: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that engine.options may replace."""
    if on_cpu:
        return {"enable_sleep_mode": False}
    options = cfg.engine.options
    kernels = options.get("kernel_config")
    is_set = {*options, *(kernels if isinstance(kernels, Mapping) else ())}
    defaults: dict[str, Any] = {"enable_sleep_mode": cfg.layout.roles.shares_devices}
    if "enable_flashinfer_autotune" not in is_set:
        # It waits in a group of all ranks, which trainers never enter.
        defaults["enable_flashinfer_autotune"] = False
    if not {"moe_backend", "quantization"} & is_set:
        # Other backends may shuffle the experts' weights as they load them. Then none of them
        # could be written in place.
        defaults["moe_backend"] = "triton"
    return defaults


def _draft_arguments(cfg: Config) -> dict[str, Any]:
    """Return the arguments of an engine with speculative decoding."""
    asked = cfg.engine.options["speculative_config"]
    # Without a number for each batch size, vLLM pads a request of one new token with draft tokens
    # of id -1. Its CPU kernel does not know these, and accepts them by a number beside the row.
    sizes = [[1, cfg.engine.max_num_seqs, cfg.engine.draft_tokens]]
    return {
        "speculative_config": asked | {"num_speculative_tokens_per_batch_size": sizes},
        "per_request_spec_decode_metrics": "summary",
    }


def _own_arguments(cfg: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that engine.options may not hold."""
    longest = cfg.longest_in_engine
    # With a smaller budget a sequence would have fewer draft tokens because of the others.
    sequences = -(-cfg.engine.max_num_seqs // cfg.layout.inference_dp)
    drawing = sequences * (1 + cfg.engine.draft_tokens)
    tokens_per_step = max(cfg.engine.max_batched_tokens, drawing)
    arguments: dict[str, Any] = dict(
        model=cfg.model.path,
        trust_remote_code=cfg.model.trust_remote_code,
        dtype=cfg.engine.dtype,
        seed=cfg.seed,
        tensor_parallel_size=cfg.layout.inference_tp,
        max_model_len=longest,
        max_num_seqs=sequences,
        # On the CPU prompts are not computed in chunks: a step must hold a whole one.
        max_num_batched_tokens=max(tokens_per_step, longest) if on_cpu else tokens_per_step,
        gpu_memory_utilization=cfg.engine.gpu_memory_frac,
        kv_cache_memory_bytes=int(cfg.engine.cpu_kv_cache_gib * 2**30) if on_cpu else None,
        # Asynchronous scheduling starts a step before the tokens of the last one are returned, so
        # weights could not be exchanged between two steps.
        async_scheduling=None if cfg.rollout.schedule.is_plain else False,
        logprobs_mode="processed_logprobs",  # of the distribution sampled from
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if cfg.layout.inference_dp > 1:
        arguments["data_parallel_size"] = cfg.layout.inference_dp
        # Otherwise a call may return without a step of the model, for which the other parts wait.
        arguments["async_scheduling"] = False
    if cfg.model.moe.replay:
        # A finished request is read before the next step is scheduled. Otherwise a stop token
        # leaves a step behind, and vLLM's own recorder (0.32) fails at the next one.
        arguments["async_scheduling"] = False
        if not on_cpu:
            arguments["enable_return_routed_experts"] = True
    if cfg.sampling.truncates:
        if on_cpu:
            # A finished request is read before the next step draws. Otherwise a token after its
            # last one would be drawn too.
            arguments["async_scheduling"] = False
        else:
            arguments["return_sampling_mask"] = True
    return arguments


# --------------------------------------------------------------------------- plain weights


def with_plain_weights(cfg: Config, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine that holds the plain weights of `model.path`.

    Args:
        arguments: of vLLM's EngineArgs. They are returned unchanged where the files are plain.
    """
    folder = model_folder(cfg.model.path)
    text = text_part(str(folder)) if cfg.model.part == "text" else None
    is_quantised = bool(quantisation(json.loads((folder / "config.json").read_text())))
    if not is_quantised and not CheckpointReader(folder, part=cfg.model.part).named:
        return arguments
    _register_loader(cfg.model.part)
    overrides: Any = {**(arguments.get("hf_overrides") or {}), **dict.fromkeys(QUANTISATION_KEYS)}
    if text:
        overrides = partial(_config_of_text, text, overrides)
    return {"load_format": _FORMAT, **arguments, "hf_overrides": overrides}


def _config_of_text(text: TextPart, overrides: dict[str, Any], config: Any) -> Any:
    """Return the text model's own part of a transformers config, as a hf_overrides of vLLM."""
    if not has_towers(config):  # vLLM tries with an empty one first
        return config
    own = text_config(config)
    own.update({"architectures": [text.architecture], "tie_word_embeddings": text.is_tied})
    own.update(overrides)
    return own


def _register_loader(part: str) -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader(_FORMAT)
    class PlainModelLoader(DefaultModelLoader):
        """vLLM's default loader, which reads tensors through our CheckpointReader."""

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
            """Yield every tensor by its name in a plain folder. Those that were quantised come in
            the engine's dtype, the others in their own."""
            reader = CheckpointReader(model_folder(model_config.model), part=part)
            for name in sorted(reader.names()):
                shape = reader.shape(name)
                tensor = reader.read(name, start=(0,) * len(shape), shape=shape)
                is_quantised = reader.is_quantised(name)
                yield name, tensor.to(model_config.dtype) if is_quantised else tensor
