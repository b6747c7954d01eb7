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
from transformers.activations import ReLUSquaredActivation

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.attention.packing_support import packing_support
from spmdrl.model.attention.state_chunks import CHANNEL_CHUNK
from spmdrl.model.attention.state_layers import supports_packed_states
from spmdrl.model.blocks import blocks, experts_modules, is_latent, mixtures, of_layers
from spmdrl.model.parallel import sequence_parallel
from spmdrl.model.parallel.tp_plan import split_dim, style_problems, tp_styles
from spmdrl.model.vision.families import has_bidirectional_images, has_vision_tower

_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_num_experts_per_tok", "top_k_experts", "moe_k")
"""Fields of configs: how many experts serve a token."""
_FLOAT32_NORMS = ("gemma", "nemotronh")
"""In names of blocks whose norms multiply by their weight in float32."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configs: how many experts a layer has."""


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    name: str  # within its block
    shape: tuple[int, ...]
    tp_dim: int | None = None  # dim that tensor parallelism shards; None keeps it whole
    is_expert: bool = False  # its first dim is the experts

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Attention:
    """The attention of a block."""

    heads: int
    kv_heads: int
    qk_dim: int  # of one head's query and key
    v_dim: int  # of one head's value
    window: int | None  # tokens that a query attends to, itself included
    has_softcap: bool
    has_qk_norm: bool
    latent: tuple[int, int, int] | None = None
    """For latent attention: ranks of the query and key/value projections, rotary dims."""


NO_ATTENTION = Attention(0, 0, 0, 0, window=None, has_softcap=False, has_qk_norm=False)
"""Of a block without attention."""


@dataclass(frozen=True)
class StateLayer:
    """A layer that keeps a state [keys, values] per head; or only the last tokens of a convolution.
    A head of Mamba 1 is a channel, with one value."""

    heads: int
    keys: int
    values: int
    channels: int  # of the convolution
    kernel: int  # tokens that it sees
    corrects: bool  # gated delta nets also read what the state answers to a key
    saved: int = 0
    """Numbers that plain torch saves per head and token; 0 for the layers of which the planner
    counts rows."""
    vllm_dtype: str = ""
    """Of the matrices in a vLLM engine, unless its options set one; empty: of the engine."""

    @property
    def matrix_numel(self) -> int:
        """Elements of the matrices of one sequence."""
        return self.heads * self.keys * self.values

    @property
    def input_numel(self) -> int:
        """Elements of the last inputs of the convolution of one sequence."""
        return self.channels * (self.kernel - 1)

    @property
    def flops(self) -> int:
        """Operations of a token beyond projections: convolve, read, decay by a product, write."""
        products = 3 if self.corrects else 2
        of_state = 2 * products * self.matrix_numel
        return of_state + 2 * self.channels * self.kernel


@dataclass(frozen=True)
class Experts:
    """The routed experts of a block."""

    count: int
    top_k: int
    intermediate: int
    width: int  # elements of a token that they read and write


@dataclass(frozen=True)
class Block:
    """One transformer block."""

    weights: tuple[Weight, ...]
    attention: Attention
    norms: int  # over the hidden size
    intermediate: int  # of the dense or shared MLP; 0 without one
    is_gated: bool = True  # MLP and experts multiply by a gate; else they square a ReLU
    experts: Experts | None = None
    state: StateLayer | None = None

    @property
    def layers(self) -> int:
        """Layers that add to the hidden states: attention, one with a state, MLP or mixture."""
        mixers = (self.attention.heads > 0) + (self.state is not None)
        return mixers + (self.intermediate > 0 or self.experts is not None)

    @property
    def dense_layers(self) -> int:
        """Those whose weights tensor parallelism splits: attention and the MLP."""
        return (self.attention.heads > 0) + (self.intermediate > 0 and self.experts is None)

    @property
    def is_mamba(self) -> bool:
        """Whether its layer with a state is of Mamba 1 or 2."""
        is_decayed = any(weight.name.endswith("A_log") for weight in self.weights)
        return self.state is not None and not self.state.corrects and is_decayed

    @cached_property
    def numel(self) -> int:
        """Parameters."""
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def matmul_numel(self) -> float:
        """Weight elements that a token is multiplied with; of the experts, top_k."""
        dense = sum(w.numel for w in self.weights if len(w.shape) == 2 and not w.is_expert)
        routed = sum(w.numel for w in self.weights if w.is_expert and len(w.shape) == 3)
        return dense + (routed * self.experts.top_k / self.experts.count if self.experts else 0)


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
        blocks=tuple(_block(n, m, styles=styles, config=config) for n, m in modules),
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


@dataclass(frozen=True)
class _Layers:
    """The layers of a block's module that add to the hidden states."""

    attention: nn.Module | None
    state: nn.Module | None
    mlp: nn.Module | None

    @classmethod
    def of(cls, block: nn.Module) -> _Layers:
        """Find them: an MLP beside attention or a layer with a state, or one layer alone.

        Raises: Refusal for other blocks.
        """
        mlp = getattr(block, "mlp", None) or getattr(block, "feed_forward", None)
        state = next(filter(supports_packed_states, block.children()), None)
        attention = getattr(block, "self_attn", None)
        if attention is state:
            attention = None
        alone = getattr(block, "mixer", None)
        if alone is not None and mlp is None and attention is None:
            if state is not None:
                return cls(None, state, None)
            is_attention = hasattr(alone, "q_proj")
            return cls(alone, None, None) if is_attention else cls(None, None, alone)
        if mlp is None or (attention is None) == (state is None):
            children = ", ".join(n for n, _ in block.named_children())
            raise Refusal(
                f"model: a block of {type(block).__name__} has {children}; only blocks with an "
                "mlp, and with self_attn or a layer with a state, or with a mixer are known"
            )
        return cls(attention, state, mlp)


def _block(name: str, module: nn.Module, *, styles: dict[str, str], config: Any) -> Block:
    own = _Layers.of(module)
    experts = getattr(own.mlp, "experts", None)
    dense = own.mlp
    if experts is not None:
        shared = (getattr(own.mlp, key, None) for key in ("shared_experts", "shared_expert"))
        dense = next(filter(None, shared), None)
    norms = [c for c in module.children() if type(c).__name__.endswith("Norm")]
    return Block(
        weights=tuple(
            Weight(n, tuple(p.shape), split_dim(f"{name}.{n}", styles), is_expert=".experts." in n)
            for n, p in module.named_parameters()
        ),
        attention=NO_ATTENTION if own.attention is None else _attention(own.attention, config),
        norms=sum(_width(norm) in (None, config.hidden_size) for norm in norms),
        intermediate=0 if dense is None else _intermediate(dense),
        is_gated=_is_gated(dense) if experts is None else getattr(experts, "has_gate", True),
        experts=None if experts is None else _experts(own.mlp, config=config),
        state=None if own.state is None else _state(own.state, config=config),
    )


def _state(module: Any, *, config: Any) -> StateLayer:
    own = _state_sizes(module)
    if hasattr(module, "forget_gate"):  # as KimiDeltaAttention of vLLM
        return replace(own, vllm_dtype="float32")
    # vLLM reads the first in Qwen3.5's config, the second in Nemotron-H's.
    names = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return replace(own, vllm_dtype=next(filter(None, (getattr(config, n, "") for n in names)), ""))


def _state_sizes(module: Any) -> StateLayer:
    convolution = next((part for part in module.children() if isinstance(part, nn.Conv1d)), None)
    if convolution is None:  # lightning attention
        size = module.head_dim
        return StateLayer(
            module.num_attention_heads, size, size, channels=0, kernel=1, corrects=False
        )
    channels = convolution.in_channels
    kernel = convolution.kernel_size[0]
    if hasattr(module, "forget_gate"):  # Kimi delta attention
        size = module.head_dim
        # Measured: pairs of tokens take a number for each channel of the key.
        saved = 64 * size + size * size // CHANNEL_CHUNK + 40
        return StateLayer(
            module.num_heads, size, size, channels, kernel, corrects=True, saved=saved
        )
    if hasattr(module, "dt_proj"):  # Mamba 1
        keys = module.ssm_state_size
        return StateLayer(channels, keys, 1, channels, kernel, corrects=False, saved=2 * keys + 8)
    corrects = hasattr(module, "num_v_heads")
    return StateLayer(
        heads=module.num_v_heads if corrects else getattr(module, "num_heads", 0),
        keys=module.head_k_dim if corrects else getattr(module, "ssm_state_size", 0),
        values=module.head_v_dim if corrects else getattr(module, "head_dim", 0),
        channels=channels,
        kernel=kernel,
        corrects=corrects,
    )


def _width(norm: nn.Module) -> int | None:
    """Return the size of a norm's weight; None for a norm without weights."""
    weight = getattr(norm, "weight", None)
    return None if weight is None else weight.numel()


def _is_gated(mlp: nn.Module | None) -> bool:
    return mlp is None or getattr(mlp, "gate_proj", None) is not None


def _intermediate(mlp: nn.Module) -> int:
    up = getattr(mlp, "up_proj", None)
    squares = isinstance(getattr(mlp, "act_fn", None), ReLUSquaredActivation)
    if not isinstance(up, nn.Linear) or not (_is_gated(mlp) or squares):
        raise Refusal(
            f"model: {type(mlp).__name__} has no up_proj with a gate_proj or a squared ReLU; only "
            "such MLPs are known"
        )
    return up.out_features


def _experts(mlp: nn.Module, *, config: Any) -> Experts:
    weight = next((p for n, p in mlp.experts.named_parameters() if p.dim() == 3), None)
    if weight is None:
        raise Refusal(
            f"model: {type(mlp.experts).__name__} holds its experts one by one; only "
            "weights of all experts in one tensor are known"
        )
    intermediate = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    top_k = [getattr(config, name, None) for name in _TOP_K]
    if not any(top_k):
        raise Refusal(
            f"model: how many experts of {type(mlp).__name__} serve a token is not known: its "
            f"config has none of {', '.join(_TOP_K)}"
        )
    most = next(filter(None, top_k))
    if not isinstance(most, int):  # one for each layer
        most = max(most)
    width = getattr(config, "moe_latent_size", None) or config.hidden_size
    return Experts(weight.shape[0], most, intermediate, width)


def _attention(module: nn.Module, config: Any) -> Attention:
    heads = config.num_attention_heads
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    if hasattr(module, "kv_b_proj"):
        return Attention(
            heads=heads,
            kv_heads=heads,
            qk_dim=module.qk_head_dim,
            v_dim=module.v_head_dim,
            window=None,
            has_softcap=has_softcap,
            has_qk_norm=False,
            latent=(module.q_lora_rank or 0, module.kv_lora_rank, module.qk_rope_head_dim),
        )
    if not (hasattr(module, "q_proj") and isinstance(getattr(module, "k_proj", None), nn.Linear)):
        raise Refusal(
            f"model: {type(module).__name__} has no q_proj, k_proj and v_proj; only "
            "attention with these, or latent attention, is known"
        )
    return Attention(
        heads=heads,
        kv_heads=module.k_proj.out_features // module.head_dim,
        qk_dim=module.head_dim,
        v_dim=module.head_dim,
        window=getattr(module, "sliding_window", getattr(config, "sliding_window", None)),
        has_softcap=has_softcap,
        has_qk_norm=hasattr(module, "q_norm"),
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
