"""A transformer block in numbers, read off its modules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from transformers.activations import ReLUSquaredActivation

from spmdrl.errors import Refusal
from spmdrl.model.attention.state_chunks import CHANNEL_CHUNK
from spmdrl.model.attention.state_layers import supports_packed_states
from spmdrl.model.parallel.tp_plan import split_dim

_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_num_experts_per_tok", "top_k_experts", "moe_k")
"""Fields of configs: how many experts serve a token."""


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


def block_shape(name: str, module: nn.Module, *, styles: dict[str, str], config: Any) -> Block:
    """Describe a block of a transformers model.

    Args:
        name: of the module in the model.
        styles: the model's tensor-parallel plan.
        config: of the language model.
    Raises: Refusal for a block of an unknown build, naming what is missing.
    """
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
