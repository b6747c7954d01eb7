"""Whether a model can be laid out along the axes of a job: what must divide what, and why not.

These rules are here only. The checks before a run (check/fit.py), the planner and ShardedModel ask
them. What must divide the ranks, whatever the model, is in world/axes.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spmdrl.config.engine_traits import ENGINE_TRAITS
from spmdrl.imports import divisors
from spmdrl.model.model_shape import ModelCounts
from spmdrl.world.axes import Axes


def misfits(
    counts: ModelCounts,
    axes: Axes,
    *,
    context: str = "auto",
    engine_kind: str = "vllm",
    is_policy: bool = True,
) -> Iterator[str]:
    """Yield why a model cannot have a layout, each as `field: what, value seen, possible values`.

    Args:
        context: model.kernels.context.
        engine_kind: engine.kind.
        is_policy: it is also in the engines, and must have experts if ep is above 1. Other models
            of a run may be dense.
    """
    yield from _tp_misfits(counts, axes.tp)
    yield from _cp_misfits(counts, axes, context=context)
    yield from _ep_misfits(counts, axes.ep, is_policy=is_policy)
    if is_policy and axes.engines and ENGINE_TRAITS[engine_kind].has_own_models:
        yield from _engine_misfits(counts, axes.inference_tp)


def _tp_misfits(counts: ModelCounts, tp: int) -> Iterator[str]:
    sizes = counts.cut_by_tp
    uncut = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    if tp > 1 and counts.tp_problem:
        yield (
            f"layout.tp: {tp} with a {counts.model_type}: {counts.tp_problem}; set layout.tp to 1"
        )
    elif uncut:
        yield (
            f"layout.tp: {tp} does not divide {', '.join(uncut)}; values that divide "
            f"all that tp cuts: {divisors(math.gcd(*sizes.values()))}"
        )


def _cp_misfits(counts: ModelCounts, axes: Axes, *, context: str) -> Iterator[str]:
    cp = axes.cp
    tp = axes.tp
    heads = counts.heads
    # Heads that tp does not divide are refused by `_tp_misfits`, and not a second time here.
    if cp > 1 and (counts.unsliced or not (heads or counts.mixers)):
        which = f"({', '.join(counts.unsliced)})" if counts.unsliced else "without attention heads"
        yield (
            f"layout.cp: {cp} with a {counts.model_type}, whose layers {which} cannot be computed "
            "on slices of a sequence; set layout.cp to 1"
        )
    elif (
        cp > 1
        and counts.bidirectional_images
        and not heads % tp
        and context_method(context, heads=heads // tp, cp=cp) != "ulysses"
    ):
        yield (
            f"layout.cp: {cp} with a {counts.model_type} by model.kernels.context {context}: "
            "the tokens of an image attend to each other in both directions, so that a rank needs "
            f"whole sequences: take ulysses, and a cp that divides the {heads} / tp {tp} = "
            f"{heads // tp} query heads: {divisors(heads // tp)}"
        )
    elif context == "ulysses" and not heads % tp and heads // tp % cp:
        yield (
            f"layout.cp: {cp} does not divide the {heads} / tp {tp} = {heads // tp} query heads "
            f"that ulysses deals out; values that do: {divisors(heads // tp)}; or set "
            "model.kernels.context to auto, which gathers where heads do not divide"
        )


def context_method(context: str, *, heads: int, cp: int) -> str:
    """Return how cp ranks exchange tokens for attention: ulysses, gather or ring.

    Args:
        context: model.kernels.context.
        heads: query heads of one tensor-parallel rank; see `misfits` for ulysses.
    """
    if context != "auto":
        return context
    return "gather" if heads % cp else "ulysses"


def _ep_misfits(counts: ModelCounts, ep: int, *, is_policy: bool) -> Iterator[str]:
    if ep > 1 and not counts.experts and is_policy:
        yield (
            f"layout.ep: {ep} with a {counts.model_type}, which has no experts; set layout.ep to 1"
        )
    if ep > 1 and counts.experts and counts.has_own_experts:
        yield (
            f"layout.ep: {ep} with a {counts.model_type}, whose experts are computed by code of "
            "its own instead of transformers' functions for experts; set layout.ep to 1"
        )
    if counts.experts % ep:
        yield (
            f"layout.ep: {ep} does not divide the {counts.experts} experts; values that do: "
            f"{divisors(counts.experts)}"
        )


def engine_rows(vocab: int) -> int:
    """Return the rows of vLLM's vocabulary: a multiple of 64."""
    return -(-vocab // 64) * 64


def _engine_misfits(counts: ModelCounts, tp: int) -> Iterator[str]:
    """Yield why vLLM cannot shard a model. Its ranks may repeat key/value heads, but divide all
    other sharded dims; the vocabulary is padded to a multiple of 64 rows."""
    whole = {
        "num_attention_heads": counts.heads,
        "intermediate_size": 0 if counts.experts else counts.intermediate,
        "padded vocab_size": engine_rows(counts.vocab),
    }

    def unsuited(size: int) -> list[str]:
        found = [f"{name} {count}" for name, count in whole.items() if count % size]
        if (kv := counts.kv_heads) and kv % size and size % kv:
            found.append(f"num_key_value_heads {kv}, nor is it a multiple")
        return found

    if counts.heads and unsuited(tp):
        fitting = ", ".join(str(n) for n in range(1, counts.heads + 1) if not unsuited(n))
        yield (
            f"layout.inference_tp: {tp} does not divide {', '.join(unsuited(tp))}; values that "
            f"suit the model: {fitting}"
        )
