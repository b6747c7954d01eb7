"""What engines of each `engine.kind` can do, to be asked before one is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTraits:
    """What the engines of one kind can do."""

    has_own_models: bool
    """Whether they compute a model by classes and kernels of their own, not by transformers'
    modules. Such classes shard a model over layout.inference_tp ranks, pad its vocabulary, cache
    latent attention as latents, and do not know every model."""
    has_options: bool
    """Whether `engine.options` are arguments of theirs."""
    has_adapters: bool
    """Whether they compute with LoRA adapters themselves."""
    reserves_memory: bool
    """Whether they take all of `engine.gpu_memory_frac` when they are built; otherwise they take
    memory that is free then."""
    pages_cache: bool
    """Whether the KV cache is handed out in pages; otherwise every sequence takes room for the
    longest one."""
    sleeps_on_cpu: bool
    """Whether they can free their KV cache on the CPU too."""
    frees_weights: bool
    """Whether they free their weights too while they sleep."""


ENGINE_TRAITS = {
    "vllm": EngineTraits(
        has_own_models=True,
        has_options=True,
        has_adapters=True,
        reserves_memory=True,
        pages_cache=True,
        sleeps_on_cpu=False,
        frees_weights=True,
    ),
    "transformers": EngineTraits(
        has_own_models=False,
        has_options=False,
        has_adapters=False,
        reserves_memory=False,
        pages_cache=False,
        sleeps_on_cpu=True,
        frees_weights=False,
    ),
}
