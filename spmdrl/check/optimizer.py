"""Whether the optimizer suits what it trains."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spmdrl.check.ranges import idle_problems
from spmdrl.config.fields import Config


def optimizer_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the section `optimizer`, each as `field: what, value seen`."""
    optimizer, memory = cfg.optimizer, cfg.model.memory
    yield from _loss_scale_problems(cfg)
    if optimizer.kind != "muon":
        why = "which has no use for it; set kind to muon, or leave it out"
        kind = f"with optimizer.kind {optimizer.kind}"
        yield from idle_problems(optimizer.muon, "optimizer.muon", f"{kind}, {why}")
        return
    if cfg.model.lora.is_on:
        yield (
            "optimizer.kind: muon with model.lora: it orthogonalises the step of a weight, and "
            "those of an adapter's factors are none; take adamw"
        )
    for name in ("master_dtype", "optimizer_dtype"):
        if getattr(memory, name) != "float32":
            yield (
                f"model.memory.{name}: {getattr(memory, name)} with optimizer.kind muon, whose "
                "weights and momentum are float32 (4 bytes of state instead of AdamW's 8); "
                "leave it out, or take adamw"
            )
    if memory.offload in ("optimizer", "all", "parameters"):
        yield (
            f"model.memory.offload: {memory.offload} with optimizer.kind muon, whose momentum is "
            "gathered on the device for each update; take none or activations, or adamw"
        )


def _loss_scale_problems(cfg: Config) -> Iterator[str]:
    model, own = cfg.model, cfg.optimizer.loss_scale
    if model.compute_dtype != "float16":
        why = f"with model.compute_dtype {model.compute_dtype}, whose gradients need none"
        yield from idle_problems(own, "optimizer.loss_scale", f"{why}; leave it out")
        return
    if not math.log2(own.initial).is_integer():
        yield (
            f"optimizer.loss_scale.initial: must be a power of 2, so that dividing by it changes "
            f"no bits, got {own.initial:g}; take {2.0 ** round(math.log2(own.initial)):g}"
        )
    if model.memory.master_dtype != "float32":
        yield (
            f"model.memory.master_dtype: {model.memory.master_dtype} with model.compute_dtype "
            "float16, which has more digits than these weights; leave it at float32"
        )
