"""A model in numbers, read off its modules on the meta device: a config.json is enough.

`ModelCounts` says what the axes of a mesh divide, for any model. `ModelShape` has the size of every
weight, from which memory, traffic and FLOPs follow; it knows blocks of an MLP and of attention or a
layer with a state, and blocks of one of these three.
Equal blocks are equal and hashable, so that a result is computed once for all of them. The
config.json files of some well-known models are in `shapes/`, for planning without a network.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from spmdrl.config import Config
from spmdrl.imports import refusing
from spmdrl.model.attention.packing_support import packing_support
from spmdrl.model.block_shape import Block, Weight, block_shape
from spmdrl.model.blocks import blocks, experts_modules, is_latent, mixtures, of_layers
from spmdrl.model.parallel import sequence_parallel
from spmdrl.model.parallel.tp_plan import split_dim, style_problems, tp_styles
from spmdrl.model.vision.families import has_bidirectional_images, has_vision_tower

_FLOAT32_NORMS = ("gemma", "nemotronh")
"""In names of blocks whose norms multiply by their weight in float32."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configs: how many experts a layer has."""


@dataclass(frozen=True)
class VisionTowerShape:
    """A vision tower, as far as memory goes: estimates from the model's config."""

    patches: float  # that it reads for one token of the language model
    patch_bytes: int  # of a patch's pixels, float32
    layers: int
    hidden: int  # elements of a patch between two blocks
    kept: int  # elements of a patch that a block keeps for its backward pass

    @classmethod
    def of(cls, config: Any) -> VisionTowerShape:
        """Read the tower's shape in the config of a vision model.

        A block keeps about ten times the hidden size (the inputs and outputs of two norms, queries,
        keys, values, the outputs of attention and projection) and three times the intermediate one.
        """
        tower = config.vision_config
        side = _first(tower.patch_size)
        # Qwen2-VL's hidden_size is the language model's.
        hidden = getattr(tower, "embed_dim", tower.hidden_size)
        intermediate = getattr(tower, "intermediate_size", None) or tower.mlp_ratio * hidden
        return cls(
            patches=_patches_per_token(config, side),
            patch_bytes=4 * 3 * side**2 * getattr(tower, "temporal_patch_size", 1),
            layers=getattr(tower, "depth", None) or tower.num_hidden_layers,
            hidden=hidden,
            kept=10 * hidden + 3 * intermediate,
        )


@dataclass(frozen=True)
class ModelCounts:
    """What axes divide in a model, 0 where it has none, and what keeps it from being divided."""

    model_type: str
    heads: int = 0  # of queries
    kv_heads: int = 0  # 0 also for latent attention, which has none of its own
    intermediate: int = 0  # width of MLPs that are no mixture of experts
    vocab: int = 0
    experts: int = 0  # of a layer
    has_own_experts: bool = False  # computed by the model's own code, which is not known here
    other: tuple[tuple[str, int], ...] = ()  # (weight and dim, size) that tp also divides
    unsliced: tuple[str, ...] = ()  # kinds of layers that need whole sequences
    padded: tuple[str, ...] = ()  # kinds of layers that compute one sequence per row
    states: tuple[str, ...] = ()  # kinds of layers that keep a state, and compute packed rows
    repeated: tuple[str, ...] = ()  # kinds of attention that attend more than once
    bidirectional_images: bool = False  # the tokens of an image attend to each other
    leak: str = ""  # why packed sequences would attend to each other
    tp_problem: str = ""  # why it cannot be tensor-parallel over any number of ranks

    @property
    def mixers(self) -> tuple[str, ...]:
        """Kinds of layers that mix tokens otherwise than by attention."""
        return tuple(sorted({*self.padded, *self.states}))

    @property
    def cut_by_tp(self) -> dict[str, int]:
        """What each tensor-parallel rank must get an equal part of, by its name in config.json."""
        own = {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
        }
        return {name: size for name, size in (*own.items(), *self.other) if size}


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A causal language model. Hashed by identity, because it has many fields."""

    name: str
    hidden: int
    vocab: int  # rows of the embedding
    has_float32_norms: bool  # they multiply by the weight before they cast to the compute dtype
    rotary: int  # kinds of rotary tables, each of `rotary_dims`
    rotary_dims: int
    blocks: tuple[Block, ...]
    root: tuple[Weight, ...]  # embedding, final norm, untied head
    counts: ModelCounts  # what axes divide in it
    tower: VisionTowerShape | None = None  # of a vision model

    @cached_property
    def numel(self) -> int:
        """Parameters in all, tied ones once."""
        return sum(b.numel for b in self.blocks) + sum(w.numel for w in self.root)

    @cached_property
    def active_numel(self) -> float:
        """Weight elements that a token is multiplied with, including the output head."""
        return sum(b.matmul_numel for b in self.blocks) + self.vocab * self.hidden

    @cached_property
    def kinds(self) -> tuple[tuple[Block, int], ...]:
        """(block, how many look like it), in order of first appearance."""
        return tuple(Counter(self.blocks).items())

    @cached_property
    def layers(self) -> int:
        """Layers of all blocks that add to the hidden states."""
        return sum(block.layers for block in self.blocks)


def model_shape(hf_model: nn.Module, *, name: str = "") -> ModelShape:
    """Describe a transformers causal LM, or scalar-headed model.

    Args:
        hf_model: on the meta device or any other.
        name: for messages; empty means the model type.
    Raises: Refusal for blocks of an unknown build, naming what is missing.
    """
    kind = type(hf_model).__name__
    what = f"model: the sizes of {kind} cannot be read off its modules"
    # Modules of an unknown build lack attributes and may raise anything.
    with refusing(what, Exception, names_kind=True, passes_refusals=True):
        return _shape(hf_model, name=name)


def _shape(hf_model: nn.Module, *, name: str) -> ModelShape:
    config = hf_model.config.get_text_config()
    modules = list(blocks(hf_model).items())
    styles = tp_styles(hf_model)
    of_block = type(modules[0][1]).__name__.lower()
    prefixes = tuple(f"{n}." for n, _ in modules)
    embedding = hf_model.get_input_embeddings().weight
    head = hf_model.get_output_embeddings()
    is_tied = head is None or bool(hf_model.config.tie_word_embeddings)
    root = [
        Weight(
            n,
            tuple(p.shape),
            # `tp_styles` has no style for the head, which is sharded by rows.
            0 if head is not None and p is head.weight and not is_tied else split_dim(n, styles),
        )
        for n, p in hf_model.named_parameters()
        if not n.startswith(prefixes)
    ]
    # Without original_inv_freq, a second buffer for the same table.
    tables = [
        b
        for m in hf_model.modules()
        for n, b in m.named_buffers(recurse=False)
        if type(m).__name__.endswith("RotaryEmbedding") and n.endswith("inv_freq")
        if "original" not in n
    ]
    return ModelShape(
        name=name or hf_model.config.model_type,
        hidden=embedding.shape[1],
        vocab=embedding.shape[0],
        has_float32_norms=any(kind in of_block for kind in _FLOAT32_NORMS),
        rotary=len(tables),
        rotary_dims=2 * tables[0].numel() if tables else 0,
        blocks=tuple(block_shape(n, m, styles=styles, config=config) for n, m in modules),
        root=tuple(root),
        counts=counts_of(hf_model),
        tower=VisionTowerShape.of(hf_model.config) if has_vision_tower(hf_model) else None,
    )


def counts_of(hf_model: nn.Module) -> ModelCounts:
    """Read off a transformers model, on any device, what axes divide in it.

    Raises: Refusal when the model does not say what its blocks are.
    """
    config = hf_model.config.get_text_config()

    def count(name: str) -> int:
        """Return what divides the field of every layer, where layers differ."""
        values = [value for value in of_layers(config, name) if isinstance(value, int)]
        return math.gcd(*values)

    support = packing_support(hf_model)

    def kinds(layers: Mapping[str, Sequence[str]]) -> list[str]:
        names = itertools.chain(*layers.values())
        return sorted({type(hf_model.get_submodule(name)).__name__ for name in names})

    padded = kinds(support.mixers)
    unsliced = [*padded]
    if support.chunk:
        unsliced.append("attention within chunks")
    has_mlp = len(mixtures(hf_model)) < len(blocks(hf_model))
    counts = ModelCounts(
        model_type=hf_model.config.model_type,
        heads=count("num_attention_heads"),
        kv_heads=0 if count("kv_lora_rank") else count("num_key_value_heads"),
        intermediate=count("intermediate_size") if has_mlp else 0,
        vocab=count("vocab_size"),
        experts=_experts_of_layers(hf_model, count),
        has_own_experts=not experts_modules(hf_model),
        unsliced=tuple(unsliced),
        padded=tuple(padded),
        states=tuple(kinds(support.states)),
        repeated=tuple(kinds({"": support.repeated})),
        bidirectional_images=has_bidirectional_images(hf_model),
        leak=support.reasons[0] if support.reasons else "",
        tp_problem=f"its {padded[0]} is not cut" if padded else tp_problem(hf_model),
    )
    return replace(counts, other=_other_sizes(hf_model, known=counts.cut_by_tp.values()))


def _experts_of_layers(hf_model: nn.Module, count: Callable[[str], int]) -> int:
    """Return what divides the experts of every layer; 0 for a model that makes no experts, whatever
    its config says.

    Args:
        count: returns what divides a field of the config in every layer.
    """
    if fused := experts_modules(hf_model):
        return math.gcd(*(experts.num_experts for experts in fused.values()))
    if not any("Expert" in type(module).__name__ for module in hf_model.modules()):
        return 0
    return next(filter(None, map(count, _EXPERTS)), 0)


def _other_sizes(hf_model: nn.Module, *, known: Iterable[int]) -> tuple[tuple[str, int], ...]:
    """Return (weight and dim, size) of what tp divides and no known size implies."""
    styles = tp_styles(hf_model)
    found: dict[int, str] = {}  # the first weight of each size
    for name, weight in hf_model.named_parameters():
        dim = split_dim(name, styles)
        # A multiple of a known size divides where that does.
        if dim is not None and all(weight.shape[dim] % size for size in known):
            found.setdefault(weight.shape[dim], f"dim {dim} of {name}")
    return tuple((name, size) for size, name in found.items())


def tp_problem(hf_model: nn.Module) -> str:
    """Return why a model cannot be tensor-parallel over any number of ranks; empty if it can."""
    styles = tp_styles(hf_model)
    problem = next(style_problems(hf_model, styles), "")
    needs_own_tokens = mixtures(hf_model) or any(map(is_latent, hf_model.modules()))
    if problem or not needs_own_tokens:
        return problem
    reason = sequence_parallel.why_not(hf_model, styles)
    if not reason:
        return ""
    return (
        "experts and latent attention need tokens sharded between layers, which cannot be done "
        f"with {type(hf_model).__name__}: {reason}"
    )


def _patches_per_token(config: Any, side: int) -> float:
    """Return the patches that become one token: a square of them, or a share of the image's."""
    tower = config.vision_config
    if hasattr(tower, "spatial_merge_size"):
        return tower.spatial_merge_size**2
    if hasattr(config, "downsample_ratio"):
        return config.downsample_ratio**-2
    return (_first(tower.image_size) // side) ** 2 / config.mm_tokens_per_image


def _first(size: Any) -> int:
    return size if isinstance(size, int) else size[0]


SHAPES = Path(__file__).with_name("shapes")
"""Folders with the config.json of well-known models."""
_SHAPE_OF = {
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-1.7B-Base": "qwen3-1.7b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B-Base": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "meta-llama/Llama-3.1-8B": "llama-3-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3-8b",
    "allenai/Llama-3.1-Tulu-3-8B-SFT": "llama-3-8b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen/Qwen3.5-35B-A3B-Base": "qwen3.5-35b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": "nemotron-3-nano-30b-a3b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
}


def with_known_shape(cfg: Config) -> Config:
    """Return a config whose model is a shape that comes along, where it names one by its hub name
    and has no folder of it: sizes need no network."""
    path = cfg.model.path
    if path not in _SHAPE_OF or Path(path).is_dir():
        return cfg
    return replace(cfg, model=replace(cfg.model, path=str(SHAPES / _SHAPE_OF[path])))
