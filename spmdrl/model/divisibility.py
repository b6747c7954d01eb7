"""Whether a model can be laid out along the axes of a job: what must divide what, and why not.

The one home of these rules. They are asked by the checks before a run (check/fit.py), by the
planner, and by ShardedModel for each model that it lays out. What ranks must divide whatever the
model is in world/axes.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from spmdrl.config.engine_traits import ENGINE_TRAITS
from spmdrl.imports import divisors
from spmdrl.model.attention.packing_support import packing_support
from spmdrl.model.blocks import blocks, experts_modules, is_latent, mixtures, of_layers
from spmdrl.model.parallel import sequence_parallel
from spmdrl.model.parallel.tp_plan import split_dim, style_problems, tp_styles
from spmdrl.model.vision_families import has_bidirectional_images
from spmdrl.world.axes import Axes

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelCounts:
    """What axes divide in a model, 0 where it has none, and what keeps it from being divided."""

    model_type: str
    heads: int = 0  # of queries
    kv_heads: int = 0  # 0 in latent attention too, which has none of its own
    intermediate: int = 0  # width of MLPs that are no mixture of experts
    vocab: int = 0
    experts: int = 0  # of a layer
    has_own_experts: bool = False  # computed by its own code, of which nothing is known here
    other: tuple[tuple[str, int], ...] = ()  # (weight and dim, size) that tp cuts besides
    unsliced: tuple[str, ...] = ()  # kinds of layers that need whole sequences
    mixers: tuple[str, ...] = ()  # kinds of those that compute one sequence per row
    bidirectional_images: bool = False  # tokens that show one thing see each other
    leak: str = ""  # why packed sequences would see each other
    tp_problem: str = ""  # why it cannot be tensor-parallel over however many ranks

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


def counts_of(hf_model: nn.Module) -> ModelCounts:
    """Read off a transformers model, on the meta device or any other, what axes divide in it.

    Raises: Refusal when the model does not say what its blocks are.
    """
    config = hf_model.config.get_text_config()

    def count(name: str) -> int:
        """Return what divides in every layer, where layers differ."""
        counts = [value for value in of_layers(config, name) if isinstance(value, int)]
        return math.gcd(*counts)

    has_mlp = len(mixtures(hf_model)) < len(blocks(hf_model))
    support = packing_support(hf_model)
    names = {name for own in support.mixers.values() for name in own}
    mixers = sorted({type(hf_model.get_submodule(name)).__name__ for name in names})
    chunked = ["attention within chunks"] if support.chunk else []
    own = ModelCounts(
        model_type=hf_model.config.model_type,
        heads=count("num_attention_heads"),
        kv_heads=0 if count("kv_lora_rank") else count("num_key_value_heads"),
        intermediate=count("intermediate_size") * has_mlp,
        vocab=count("vocab_size"),
    )
    styles = tp_styles(hf_model)
    known = own.cut_by_tp.values()
    other: dict[int, str] = {}  # the first of each size
    for name, weight in hf_model.named_parameters():
        dim = split_dim(name, styles)
        # A multiple of what is known divides as that does.
        if dim is not None and all(weight.shape[dim] % size for size in known):
            other.setdefault(weight.shape[dim], f"dim {dim} of {name}")
    return replace(
        own,
        experts=next((number for number in map(count, _EXPERTS) if number), 0),
        has_own_experts=not experts_modules(hf_model),
        other=tuple((name, size) for size, name in other.items()),
        unsliced=(*mixers, *chunked),
        mixers=tuple(mixers),
        bidirectional_images=has_bidirectional_images(hf_model),
        leak=next(iter(support.reasons), ""),
        tp_problem=f"its {mixers[0]} is not cut" if mixers else why_never(hf_model),
    )


def why_never(hf_model: nn.Module) -> str:
    """Return why a model cannot be tensor-parallel, over however many ranks; empty if it can."""
    styles = tp_styles(hf_model)
    kind = type(hf_model).__name__
    for name, module in hf_model.named_modules():
        if name.endswith("act_fn") and any(True for _ in module.parameters()):
            own = f"{type(module).__name__} of {name}"
            return f"{own} has parameters, of whose gradient each rank would have a part"
    problem = next(style_problems(hf_model, styles), "")
    needs_own = mixtures(hf_model) or any(is_latent(module) for module in hf_model.modules())
    if problem or not needs_own:
        return problem
    reason = sequence_parallel.why_not(hf_model, styles)
    return reason and (
        f"experts and latent attention need tokens sharded between layers, which "
        f"cannot be done with {kind}: {reason}"
    )


def misfits(
    counts: ModelCounts,
    axes: Axes,
    *,
    context: str = "auto",
    engine_kind: str = "vllm",
    is_policy: bool = True,
) -> Iterator[str]:
    """Yield why a model cannot be laid out so, each as `field: what, value seen, values that suit`.

    Args:
        context: model.kernels.context.
        engine_kind: engine.kind.
        is_policy: it is in the engines too, and has experts if there is ep; the models beside it
            may be dense.
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
    if cp > 1 and (counts.unsliced or not heads):
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
            "tokens that show one thing see each other, for which a rank needs whole sequences: "
            f"take ulysses, and a cp that divides the {heads} / tp {tp} = {heads // tp} query "
            f"heads: {divisors(heads // tp)}"
        )
    elif context == "ulysses" and not heads % tp and heads // tp % cp:
        yield (
            f"layout.cp: {cp} does not divide the {heads} / tp {tp} = {heads // tp} query heads "
            f"that ulysses deals out; values that do: {divisors(heads // tp)}; or set "
            "model.kernels.context to auto, which gathers where heads do not divide"
        )


def context_method(context: str, *, heads: int, cp: int) -> str:
    """Return how attention exchanges over cp ranks: ulysses, gather or ring.

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
    """Yield why vLLM cannot cut a model: its ranks may hold the same key/value heads, but share
    out all else that is cut, of the vocabulary a multiple of 64 rows."""
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
