"""The inputs of a plan: the run, and the rates of a GPU, assumed or measured by
`python -m benchmarks.gpu`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmdrl.check.prefixes import sharing_of
from spmdrl.check.proved_models import pushed_by
from spmdrl.config import Config, EngineSettings
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.head import head_chunk_tokens
from spmdrl.model.lora.layers import lora_form
from spmdrl.model.lora.quantised_base import BaseForm
from spmdrl.model.lora.targets import adapter_numel
from spmdrl.model.model_shape import ModelShape, model_shape
from spmdrl.model.parallel.recompute import has
from spmdrl.run_files import SMALL, json_of, read_bytes
from spmdrl.tools.plan.activations import Kernels
from spmdrl.train.objectives.objective_loss import follows_teacher, needed_columns
from spmdrl.value_forms import is_number
from spmdrl.world.axes import Axes
from spmdrl.world.machine.hardware import GPUS, LINK_FRAC, MEMORY_FRAC, Gpu, known_gpu


@dataclass(frozen=True, eq=False)
class Run:
    """What a config asks for, on any layout. Hashed by identity, because it has many fields."""

    cfg: Config
    shape: ModelShape
    engine: EngineSettings
    kernels: Kernels
    on_gpu: bool
    master_bytes: int  # of a weight, and of its gradient; 0 where all models' are on the host
    moment_bytes: float  # of AdamW's two moments on the device; 0 where they are on the host
    sequences: int  # per step
    prompt_tokens: float  # mean
    response_tokens: float  # mean
    forwards: int  # passes over a batch without the training passes and those of teachers
    teacher_passes: int  # over a batch, all teachers together
    teacher_prompt_tokens: float  # mean, of what teachers read before a response
    frozen_models: int  # reference, teachers, reward models, as large as the policy
    trained_models: int  # without the policy: 1 with a critic
    lora_numel: int  # elements of all adapters; 0 trains all weights
    chunk_tokens: int  # positions whose logits exist at once
    engine_sleeps: bool  # its memory is lent to the update, colocated
    reloads: str  # why engines reload whole tensors in a push; empty where slices are written
    engine_bytes: int  # of one element of its weights and cache
    engine_scales: tuple[int, int] | None = None
    """Rows and columns of a weight that have a float32 scale in common, 0 for all, where the engine
    keeps its weights in 8 bits."""
    shares_prefixes: bool = False  # all models can, and batch.share_prefixes lets them
    unshared: str = ""  # which models cannot, and why

    @property
    def taught(self) -> Run:
        """The same run with the prompts of teachers."""
        return replace(self, prompt_tokens=self.teacher_prompt_tokens)

    @property
    def tokens(self) -> float:
        """Of a step, prompts and responses."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)

    @property
    def base(self) -> BaseForm | None:
        """How trainers store the weights under adapters; None: in the compute dtype."""
        lora = self.cfg.model.lora
        dtype = getattr(torch, self.cfg.model.compute_dtype)
        return BaseForm(lora.base, dtype) if self.lora_numel and lora.quantises else None

    def keeps_weights(self, axes: Axes) -> bool:
        """Return whether a sleeping engine keeps its weights, in pinned host memory: where a push
        does not write all of them (see WeightStream.lend_memory)."""
        writes_all_weights = not self.reloads and not self.cfg.model.lora.pushes_adapter
        sleeps = self.on_gpu and self.engine_sleeps and self.engine.traits.frees_weights
        return axes.roles.shares_devices and sleeps and not writes_all_weights


def run_of_model(
    cfg: Config, hf_model: nn.Module, *, prompt_tokens: float, response_tokens: float
) -> Run:
    """Return what a config asks for, with all that the policy itself decides.

    Args:
        hf_model: the policy, as transformers builds it; may be on meta.
        prompt_tokens, response_tokens: see `run_of`.
    Raises: Refusal for an unknown method.
    """
    lora = cfg.model.lora
    on_gpu = cfg.layout.device != "cpu"
    sharing = sharing_of(cfg, hf_model)
    run = run_of(
        cfg,
        model_shape(hf_model, name=Path(cfg.model.path).name),
        on_gpu=on_gpu,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        lora_numel=adapter_numel(hf_model, lora_form(lora)) if lora.is_on else 0,
        chunk_tokens=head_chunk_tokens(cfg, hf_model, on_gpu=on_gpu),
        family=hf_model.config.model_type,
        shares_prefixes=not sharing.unable and cfg.batch.share_prefixes == "auto",
    )
    return replace(run, unshared=sharing.reason)


def run_of(
    cfg: Config,
    shape: ModelShape,
    *,
    on_gpu: bool,
    chunk_tokens: int,
    prompt_tokens: float,
    response_tokens: float,
    lora_numel: int = 0,
    family: str = "",
    shares_prefixes: bool = False,
) -> Run:
    """Return what a config asks for.

    Args:
        shape: of the policy.
        on_gpu: plan for CUDA's kernels.
        chunk_tokens: positions whose logits exist at once, see model/head.py.
        prompt_tokens, response_tokens: means; 0 takes half of the longest that may come.
        lora_numel: elements of all adapters, see model/lora/layers.py.
        family: the policy's `model_type`, by which records say how weights reach an engine.
        shares_prefixes: sequences of a micro-batch compute a common prefix once.
    Raises: Refusal for an unknown method.
    """
    memory = cfg.model.memory
    lora = cfg.model.lora
    group = cfg.sequences_per_row
    columns = needed_columns(cfg)
    is_taught = follows_teacher(cfg)
    has_reference = "ref_logprobs" in columns or (is_taught and "reference" in cfg.teachers)
    # With adapters the reference is the policy without them, which needs no second model.
    own_reference = has_reference and not (lora.is_on and not cfg.model.reference.path)
    prompt_tokens = prompt_tokens or cfg.data.max_prompt_tokens / 2
    teacher_prompt = cfg.data.max_teacher_prompt_tokens / 2 if cfg.hints_teacher else prompt_tokens
    # Whole distributions are compared in each epoch; logprobs are computed once.
    teacher_passes = cfg.batch.epochs if cfg.objective.needs_teacher else int(is_taught)
    is_away = on_gpu and has(memory.offload, "optimizer")
    has_none = on_gpu and has(memory.offload, "parameters")
    return Run(
        cfg=cfg,
        shape=shape,
        engine=cfg.engine,
        kernels=_kernels(cfg, shape, on_gpu=on_gpu),
        on_gpu=on_gpu,
        master_bytes=0 if has_none else item_bytes(memory.master_dtype),
        moment_bytes=0 if is_away else 2 * moment_bytes(memory.optimizer_dtype),
        sequences=cfg.batch.prompts_per_step * group,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens or cfg.sampling.max_response_tokens / 2,
        forwards=len(columns & _PASSES),
        teacher_passes=teacher_passes,
        teacher_prompt_tokens=teacher_prompt,
        frozen_models=own_reference + (len(cfg.teacher_paths) if is_taught else 0),
        trained_models=int(not columns.isdisjoint({"values", "prm_logprobs"})),
        lora_numel=lora_numel,
        chunk_tokens=chunk_tokens,
        engine_sleeps=_engine_sleeps(cfg, on_gpu=on_gpu),
        reloads=_reloads(cfg, family, shape),
        engine_bytes=item_bytes(cfg.engine.dtype),
        engine_scales=_engine_scales(cfg),
        shares_prefixes=shares_prefixes,
    )


def _reloads(cfg: Config, family: str, shape: ModelShape) -> str:
    """Return why engines reload whole tensors in a push; empty where slices are written."""
    if cfg.stream.mode == "reload":
        return "stream.mode is reload"
    if cfg.engine.options.get("quantization"):
        return f"engine.options quantization is {cfg.engine.options['quantization']}"
    if family and pushed_by(family, engine_kind=cfg.engine.kind) == "reload":
        return f"{cfg.engine.kind}'s code for {family} changes weights as it loads them"
    if cfg.engine.traits.has_own_models and any(block.is_mamba for block, _ in shape.kinds):
        return "vLLM's Mamba layers hold -exp(A_log)"
    return ""


_SCALES = {
    "fp8": (0, 0),
    "fp8_per_tensor": (0, 0),
    "fp8_per_channel": (1, 0),
    "fp8_per_block": (128, 128),
}


def _engine_scales(cfg: Config) -> tuple[int, int] | None:
    """Return what of an engine's weight has a scale in common; None for weights in its dtype.

    Raises: Refusal for a quantisation whose bytes are not known.
    """
    name = cfg.engine.options.get("quantization")
    if name and name not in _SCALES:
        raise Refusal(
            f"engine.options quantization: the planner does not know the bytes of {name}; known: "
            f"{', '.join(_SCALES)}; leave it out to plan with engine.dtype"
        )
    return _SCALES[name] if name else None


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element of a torch dtype."""
    return getattr(torch, dtype).itemsize


def moment_bytes(dtype: str) -> float:
    """Return the bytes of an element of AdamW's moments; in 8 bits with its share of the block's
    scale."""
    return item_bytes(dtype) + (4 / 256 if dtype == "int8" else 0)


def _engine_sleeps(cfg: Config, *, on_gpu: bool) -> bool:
    """Return whether handover.py can put an engine to sleep: not with requests left over."""
    if cfg.rollout.schedule.leaves_unfinished:
        return False
    if not on_gpu:
        return cfg.engine.traits.sleeps_on_cpu
    return cfg.engine.options.get("enable_sleep_mode", True)


# Columns that take a forward pass over the batch each, but those of teachers.
_PASSES = {"old_logprobs", "ref_logprobs", "values", "prm_logprobs"}


def _kernels(cfg: Config, shape: ModelShape, *, on_gpu: bool) -> Kernels:
    kernels = cfg.model.kernels
    memory = cfg.model.memory
    c = item_bytes(cfg.model.compute_dtype)
    is_padded = kernels.attention == "padded" or not (on_gpu and c == 2)
    mode = memory.activation_checkpointing
    is_gated = all(block.is_gated for block in shape.blocks)  # liger refuses other models
    return Kernels(
        compute_bytes=c,
        is_padded=is_padded,
        has_liger=on_gpu and kernels.liger and is_gated,
        recomputes=mode == "full",
        is_selective=mode == "selective",
        on_host=on_gpu and memory.offload in ("activations", "all"),
        on_gpu=on_gpu,
        is_deterministic=cfg.deterministic,
    )


_SLOW = {"matmul_frac": 0.31, "engine_step_s": 0.012}
"""The slow ends of ranges: matmuls of 1.7 B parameters that are recomputed in full, and a host that
serves 256 sequences in one Python thread. The fast ends, in Rates, are 8 B parameters with
selective checkpointing, and an idle host."""


@dataclass(frozen=True)
class Rates:
    """Rates that a GPU and its links reach in practice. Bandwidths are per GPU and direction.

    Nobody has measured them. Where too little is known, `slow` has the slow end of a range.
    """

    gpu: Gpu
    gpus_per_node: int = 8
    host_memory_bytes: int = 0  # of a node; 0: unknown
    matmul_frac: float = 0.45  # of the peak, in training and prefill
    memory_frac: float = MEMORY_FRAC
    link_frac: float = LINK_FRAC
    engine_step_s: float = 0.003  # an engine step's work on the host
    collective_s: float = 20e-6  # before a collective's first byte
    slow: Mapping[str, float] = field(default_factory=lambda: dict(_SLOW))
    """{field: its value at the slow end of the range}."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """{phase, or `step`: how many times longer it took in a measured run}."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """{field: source, as pages show it} of rates that are not the formula's."""

    def known(self, rates: Mapping[str, float], *, source: str) -> Rates:
        """Return these rates with some replaced, which come from `source`."""
        sources = {**self.sources, **dict.fromkeys(rates, source)}
        slow = {name: value for name, value in self.slow.items() if name not in rates}
        changed: dict[str, Any] = {**rates, "sources": sources, "slow": slow}
        return replace(self, **changed)

    def by_run(self, scales: Mapping[str, float], *, source: str) -> Rates:
        """Return these rates for phases that are `scales` times longer than they say."""
        sources = dict.fromkeys(FORMULA_RATES, source)
        return replace(self, slow={}, scales=scales, sources=sources)

    @property
    def slowest(self) -> Rates:
        """The rates at the slow ends of their ranges."""
        changed: dict[str, Any] = {**self.slow, "slow": {}}
        return replace(self, **changed)

    def source(self, name: str) -> str:
        """Return where a rate is from."""
        return self.sources.get(name, "formula")

    @property
    def memory_bytes(self) -> int:
        """Of the GPU."""
        return int(self.gpu.memory_gib * 2**30)

    @property
    def flops(self) -> float:
        """Reached in matmuls, 1/s."""
        return self.gpu.flops * self.matmul_frac

    def link(self, span: int) -> float:
        """Return the bandwidth within a group that reaches over `span` neighbouring ranks."""
        is_within = span <= self.gpus_per_node
        own = self.gpu.node_bytes_per_s if is_within else self.gpu.network_bytes_per_s
        return own * self.link_frac

    @property
    def host_link(self) -> float:
        """Bandwidth between a GPU and its host's memory."""
        return self.gpu.host_bytes_per_s * self.link_frac


FORMULA_RATES = ("matmul_frac", "memory_frac", "link_frac", "engine_step_s", "collective_s")
"""Rates that are assumed, the same for every GPU, as long as nobody measured them."""


def rates_of(name: str, **changed: float) -> Rates:
    """Return the rates of a GPU of the table, with some fields of it replaced.

    Raises: Refusal for a GPU that is not in the table.
    """
    if name not in GPUS:
        raise Refusal(
            f"--gpu {name}: not in the table; known: {', '.join(GPUS)}; take the "
            "nearest and give its memory and rates by flags"
        )
    own: dict[str, Any] = {field: value for field, value in changed.items() if value}
    return Rates(replace(GPUS[name], **own))


def read_measured(path: str) -> tuple[str, dict[str, float]]:
    """Return the name of the GPU that a file of benchmarks/results/gpu was measured on, and its
    rates, by the names of the fields of Rates.

    Raises: Refusal for another kind of file, a rate that is unknown or cannot be, a GPU that
        is not in the table.
    """
    measured = _read_rates(path)
    name = str(measured["gpu"])
    gpu = known_gpu(name)
    if gpu is None:
        raise Refusal(
            f"--measured {path}: it was measured on {name!r}, which is not in the table "
            f"({', '.join(GPUS)}), and its rates are fractions of what a row there says; leave it "
            "out and give rates by flags"
        )
    rates = {field: value for field, value in measured.items() if field != "gpu"}
    if not rates:
        raise Refusal(
            f"--measured {path}: it holds no rate, only the GPU; the parts that measure some are "
            "update_1b, update_4b, engine_1b and push_2: python -m benchmarks.gpu --parts ..."
        )
    for name, value in rates.items():
        _check_rate(path, name, value)
    return gpu.name, rates


def _read_rates(path: str) -> dict[str, Any]:
    """Return the object `rates` of a file."""
    kinds = (OSError, UnicodeDecodeError)
    with refusing(f"--measured {path}: cannot be read as JSON", *kinds):
        text = read_bytes(Path(path).expanduser(), SMALL).decode()
        found = json_of(text, place=f"--measured {path}")
    rates = found.get("rates") if isinstance(found, dict) else None
    if not isinstance(rates, dict) or not isinstance(rates.get("gpu"), str):
        raise Refusal(
            f"--measured {path}: not what `python -m benchmarks.gpu` writes: expected an object "
            "with `machine`, `rates` and `rows`, and in `rates` the `gpu`; give the .json beside "
            "a table of benchmarks/results/gpu"
        )
    return rates


def _check_rate(path: str, field: str, value: Any) -> None:
    if field not in FORMULA_RATES:
        raise Refusal(
            f"--measured {path}: rates.{field}: unknown; known: gpu, {', '.join(FORMULA_RATES)}"
        )
    most = 1.0 if field.endswith("_frac") else math.inf
    if not is_number(value) or not 0 < value <= most or not math.isfinite(value):
        what = "a fraction, in (0, 1]" if most == 1 else "seconds above 0"
        raise Refusal(f"--measured {path}: rates.{field}: {value!r}: expected {what}")
