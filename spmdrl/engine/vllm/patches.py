"""Patches of vLLM.

Those of its models and its Transformers backend let a trainer live in the same process. Those of
its CPU build let weights be written in place.

Serves vLLM 0.24 to 0.33; patches with versions in brackets serve only these. Each line has the name
here, what it patches, and when it can be removed.

patch_models               applies the next four
keep_transformers_classes  models.transformers.base.Base, support_torch_compile
                                                    once it decorates classes of its own
keep_head_bias             ParallelLMHead._register_bias   once a second loading keeps the bias
count_own_ranks            models.gpt_oss.MLPBlock         once it asks no rank but its engine's
add_phimoe_head_bias       models.phimoe.PhiMoEForCausalLM.compute_logits   once it adds the bias
patch_cpu_build            applies the next eleven
inspect_models_here        model_executor.models.registry._run_in_subprocess
                                                    once that is an option
keep_linear_weights_live   model_executor.layers.utils.dispatch_cpu_unquantized_gemm
                                                    once CPU linears may stay unpacked
keep_convolutions_live     _custom_ops.causal_conv1d_fwd_cpu, causal_conv1d_update_cpu (0.32, 0.33)
                                                    with keep_linear_weights_live
rotate_every_head          _custom_ops.rotary_embedding    once its kernel knows such heads
route_in_one_group         fused_moe.router.cpu_router.CPURouter (0.32, 0.33)
                                                    once it knows such routers
keep_expert_weights_live   fused_moe.experts.cpu_moe.CPUUnquantizedExperts (0.32, 0.33)
                                                    once CPU experts may stay unpacked
choose_cpu_experts         fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend,
                           in expert_adapters.py (0.32, 0.33)
                                                    once its CPU experts know LoRA
exchange_tokens            distributed.device_communicators.cpu_communicator.CpuCommunicator
                                                    once it gathers different numbers of rows
draw_numbers_ahead         sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu (0.32, 0.33)
                                                    once it makes no call per request
leave_adapters_out         lora.ops.torch_ops.bgmv_expand, bgmv_expand_slice, and their names in
                           lora_ops and punica_cpu
                                                    once they know the index -1
keep_numbers_of_drafts     sample.rejection_sampler.expand_batch_to_tokens, and
                           apply_sampling_constraints (0.32, 0.33)
                                                    once its CPU kernel returns what it computes,
                                                    and steps without draft tokens have a top_k
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.engine.vllm.expert_adapters import LowRank, choose_cpu_experts
from spmdrl.world.torch_internals import all_gather_single

_NUMBERS_AHEAD = 32
_ADDED = ("__init__", "__call__", "save_aot_compiled_function", "_ignore_compile_vllm")


# --------------------------------------------------------------------------- models


def patch_models() -> None:
    """Apply the patches of models. A second call changes nothing."""
    keep_transformers_classes()
    keep_head_bias()
    count_own_ranks()
    add_phimoe_head_bias()


def keep_transformers_classes() -> None:
    """Have the Transformers backend subclass transformers' class instead of changing it.

    vLLM permanently gives the class itself another base, `__init__` and `__call__`. Then no model
    of that class can be built outside an engine (`Current vLLM config is not set`), and none that
    was built before can be called.
    """
    from vllm.model_executor.models.transformers import base

    if hasattr(base.Base.__init__, "__wrapped__"):
        return
    build = base.Base.__init__
    decorate = base.support_torch_compile

    @wraps(build)
    def built(self: Any, **options: Any) -> None:
        originals: list[_OriginalClass] = []

        def decorate_noted(**settings: Any) -> Any:
            def decorated(cls: type) -> type:
                originals.append(_OriginalClass(cls))
                return decorate(**settings)(cls)

            return decorated

        base.support_torch_compile = decorate_noted
        try:
            build(self, **options)
        finally:
            base.support_torch_compile = decorate
            for original in originals:
                original.restore(self)
        # vLLM traced forwards with torch.fx, which left these.
        for module in self.modules():
            for name in list(vars(module)):
                if name.startswith("_tensor_constant"):
                    delattr(module, name)

    base.Base.__init__ = built


def keep_head_bias() -> None:
    """Have every loading of weights write the head's bias in place.

    The Transformers backend creates the bias when it loads it, so a later loading would create
    another one.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    register = getattr(ParallelLMHead, "_register_bias", None)
    if register is None or hasattr(register, "__wrapped__"):
        return

    @wraps(register)
    def register_once(self: Any) -> None:
        if getattr(self, "bias", None) is None:
            register(self)

    ParallelLMHead._register_bias = register_once


def count_own_ranks() -> None:
    """Divide GPT-OSS's experts by the ranks of their engine, not by those of the job."""
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.models import gpt_oss

    gpt_oss.dist = SimpleNamespace(
        is_initialized=lambda: True, get_world_size=get_tensor_model_parallel_world_size
    )


def add_phimoe_head_bias() -> None:
    """Add the bias of PhiMoE's head to its logits: vLLM loads it and does not add it."""
    try:
        from vllm.model_executor.models.phimoe import PhiMoEForCausalLM
    except ImportError:
        return

    def compute_logits(self: Any, hidden_states: Any) -> Any:
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)

    PhiMoEForCausalLM.compute_logits = compute_logits


def _own_attributes(cls: type) -> dict[str, Any]:
    """Return what a class itself has of the attributes that vLLM's decorator sets."""
    return {name: cls.__dict__[name] for name in _ADDED if name in cls.__dict__}


class _OriginalClass:
    """A class as it was before vLLM decorated it."""

    def __init__(self, cls: type):
        self._cls = cls
        self._bases = cls.__bases__
        self._own = _own_attributes(cls)

    def restore(self, model: nn.Module) -> None:
        """Restore the class, and make its modules in `model` those of a decorated subclass."""
        cls = self._cls
        added: dict[str, Any] = _own_attributes(cls)
        own_bases = tuple(base for base in cls.__bases__ if base not in self._bases)
        for name in added:
            delattr(cls, name)
        for name, value in self._own.items():
            setattr(cls, name, value)
        cls.__bases__ = self._bases
        if not own_bases:
            return
        added.update(__module__=cls.__module__, __qualname__=cls.__qualname__)
        decorated = type(cls.__name__, (cls, *own_bases), added)
        for module in model.modules():
            if type(module) is cls:
                module.__class__ = decorated


# --------------------------------------------------------------------------- the CPU build


def patch_cpu_build() -> None:
    """Apply the patches of the CPU build. A second call changes nothing."""
    inspect_models_here()
    keep_linear_weights_live()
    keep_convolutions_live()
    rotate_every_head()
    route_in_one_group()
    keep_expert_weights_live()
    choose_cpu_experts()
    exchange_tokens()
    draw_numbers_ahead()
    leave_adapters_out()
    keep_numbers_of_drafts()


def inspect_models_here() -> None:
    """Inspect a model's class in this process, which loads it in any case.

    vLLM starts a process for it, so that this one touches no GPU. That takes 10 s of a core on
    every rank, for each class that its cache does not know.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def keep_linear_weights_live() -> None:
    """Stop vLLM's CPU build from packing linear weights into copies and freeing the originals.

    With packed copies an update in place finds empty tensors. Costs under 3% of throughput.
    """
    from vllm.model_executor.layers import utils

    def unpacked(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def keep_convolutions_live() -> None:
    """Have convolutions over tokens use their weights as they were loaded.

    On CPUs with AVX512-bf16 vLLM packs these weights together with those of linear layers, which
    `keep_linear_weights_live` prevents, but still tells the kernels that they are packed.
    """
    from vllm import _custom_ops

    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        kernel = getattr(_custom_ops, name, None)
        if kernel is not None and not hasattr(kernel, "__wrapped__"):
            setattr(_custom_ops, name, _of_unpacked(kernel))


def _of_unpacked(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(kernel)
    def call(*, weight: Tensor, is_weight_packed: bool, **others: Any) -> Tensor:
        """weight: [channels, 1, width], or without its second dim."""
        return kernel(weight=weight.flatten(1), is_weight_packed=False, **others)

    return call


def rotate_every_head() -> None:
    """Have the rotary kernel rotate all heads also where they are a dim of their own (LFM2): it
    would take that dim for one of tokens."""
    from vllm import _custom_ops

    kernel = _custom_ops.rotary_embedding
    if hasattr(kernel, "__wrapped__"):
        return

    @wraps(kernel)
    def rotate(
        positions: Tensor, query: Tensor, key: Tensor | None, *others: Any, **options: Any
    ) -> None:
        query_rows = query.reshape(*positions.shape, -1)
        key_rows = None if key is None else key.reshape(*positions.shape, -1)
        kernel(positions, query_rows, key_rows, *others, **options)
        # reshape copies a part of each head, and views whole ones.
        if query_rows.data_ptr() != query.data_ptr():
            query.copy_(query_rows.view_as(query))
        if key is not None and key_rows is not None and key_rows.data_ptr() != key.data_ptr():
            key.copy_(key_rows.view_as(key))

    _custom_ops.rotary_embedding = rotate


def route_in_one_group() -> None:
    """Have routers without groups of experts use sigmoids and biases, as those with groups do.

    Without groups vLLM's CPU build knows only the softmax: it refuses sigmoids (MiniMax-M2), and
    silently leaves out the bias that experts are chosen by (Ernie 4.5).
    """
    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:
        return
    build = CPURouter.__init__
    if hasattr(build, "__wrapped__"):
        return

    @wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        is_plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        is_known = self.scoring_func in ("softmax", "sigmoid") and not self.custom_routing_function
        if is_known and not is_plain and not self.use_grouped_topk:
            self.use_grouped_topk = True
            self.num_expert_group = 1
            self.topk_group = 1

    CPURouter.__init__ = built


def keep_expert_weights_live() -> None:
    """Have vLLM's CPU build compute experts from their weights as they were loaded.

    It packs them into storage of the same shape, and its reload (0.32.0) leaves the new ones
    unpacked. So neither a write in place nor a reload would be right. Versions without that module
    are refused by the proof of layout.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return

    def keep(self: Any, layer: nn.Module) -> None:
        self._use_zentorch = False

    CPUUnquantizedExperts.process_weights_after_loading = keep
    CPUUnquantizedExperts.apply = _apply_experts


def _apply_experts(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    expert_map: Tensor | None = None,
    **others: Any,
) -> None:
    """Write the experts' weighted sum into output, [T, H], as `CPUUnquantizedExperts.apply` does.

    That one takes the experts of an expert-parallel rank for the first of the model.

    Args:
        w1: [E, 2 I, H], gate before up.
        w2: [E, H, I].
        topk_weights, topk_ids: [T, K].
        expert_map: {expert of the model: expert of this rank, or -1}; None if it has all.
        others: what kernels of vLLM need.
    """
    num_tokens, num_chosen = topk_ids.shape
    chosen = topk_ids.flatten().long()
    ids, order = torch.sort(
        chosen if expert_map is None else expert_map[chosen].long(), stable=True
    )
    is_here = ids >= 0
    ids = ids[is_here]
    order = order[is_here]
    tokens = order // num_chosen
    rows = hidden_states[tokens]
    context = getattr(self, "_lora_context", None)
    low_rank = None if context is None else LowRank(context, tokens)
    begin = 0
    parts = []
    for index, part in enumerate(rows.split(torch.bincount(ids, minlength=len(w1)).tolist())):
        bias1 = None if self.w1_bias is None else self.w1_bias[index]
        bias2 = None if self.w2_bias is None else self.w2_bias[index]
        gate_up = nn.functional.linear(part, w1[index], bias1)
        if low_rank is not None:
            low_rank.add_first(gate_up, part, expert=index, begin=begin)
        inner = gate_up.new_empty(len(part), w2.shape[2])
        if len(part):
            _activate(activation, inner, gate_up)
        parts.append(nn.functional.linear(inner, w2[index], bias2))
        if low_rank is not None:
            low_rank.add_second(parts[-1], inner, expert=index, begin=begin)
        begin += len(part)
    computed = hidden_states.new_zeros(len(chosen), hidden_states.shape[1])
    computed.index_copy_(0, order, torch.cat(parts))
    computed = computed.view(num_tokens, num_chosen, -1)
    if not apply_router_weight_on_input:  # otherwise the rows are weighted already
        computed = computed * topk_weights[..., None]
    output.copy_(computed.sum(dim=1))


def _activate(activation: Any, output: Tensor, rows: Tensor) -> None:
    """Write an expert's activation of rows, [S, 2 I], into output, [S, I].

    In the CPU build only the packed kernel has GPT-OSS's activation: the numbers are copied from
    there.
    """
    from vllm.model_executor.layers.activation import SwigluOAIAndMul
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    if activation.value == "swigluoai":
        numbers = SimpleNamespace(alpha=1.702, limit=7.0)
        output.copy_(SwigluOAIAndMul.forward_native(numbers, rows))  # type: ignore[arg-type]
    else:
        apply_moe_activation(activation, output, rows)


def exchange_tokens() -> None:
    """Let ranks with different numbers of tokens exchange those of experts.

    With data-parallel attention vLLM gathers the tokens of all ranks, and sums what each rank's
    experts make of them. Its CPU build has this for equal numbers alone.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _gather_rows
    CpuCommunicator.reduce_scatterv = _sum_rows


def _gather_rows(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """Return the rows of all ranks of the group, [sum(sizes), ...], in rank order.

    Args:
        input_: [sizes[own rank], ...], or several.
        dim: 0.
        sizes: rows of each rank; None if all have the same.
    """
    if isinstance(input_, list):
        return [_gather_rows(self, rows, dim, sizes) for rows in input_]
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    gathered = padded.new_empty(self.world_size * len(padded), *padded.shape[1:])
    all_gather_single(gathered, padded, group=self.device_group)
    parts = gathered.chunk(self.world_size)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sum_rows(self: Any, input_: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """Return this rank's rows of the sum over the ranks of the group, [sizes[own rank], ...].

    Args:
        input_: [sum(sizes), ...].
        dim: 0.
        sizes: as in `_gather_rows`.
    """
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group]


def draw_numbers_ahead() -> None:
    """Have the sampler take each request's random numbers from its generator many at a time.

    vLLM takes one number per request and step, by several calls of torch: for 64 requests that is a
    twentieth of a step of a small model. A generator yields the same numbers either way, so the
    same tokens are drawn.
    """
    from vllm import _custom_ops  # noqa: F401, it loads the kernels
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    draw = sampler.TopKTopPSampler.forward_cpu
    has_kernel = hasattr(torch.ops._C, "fused_gumbel_argmax")  # 0.24 draws otherwise
    if hasattr(draw, "__wrapped__") or not has_kernel:
        return
    ahead: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()

    def next_number(generator: torch.Generator) -> int:
        numbers = ahead.setdefault(generator, [])
        if not numbers:
            drawn = torch.randint(0, 2**31, (_NUMBERS_AHEAD,), generator=generator)
            numbers.extend(reversed(drawn.tolist()))
        return numbers.pop()

    @wraps(draw)
    def forward(
        self: Any,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """logits: [N, V]; generators: by row."""
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            return draw(self, logits, generators, k, p)
        logits = sampler.apply_top_k_top_p(logits, k, p)
        logprobs_of = getattr(self, "logprobs_of", _log_softmax)  # set by exact.py
        logprobs = logprobs_of(logits)
        numbers = torch.randint(0, 2**31, (len(logits),))
        if generators:
            own = [next_number(generator) for generator in generators.values()]
            numbers[[*generators]] = torch.tensor(own)
        return torch.ops._C.fused_gumbel_argmax(logits.float(), numbers), logprobs

    sampler.TopKTopPSampler.forward_cpu = forward


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def leave_adapters_out() -> None:
    """Have adapters add nothing to tokens of requests without one. Their index is -1, by which
    vLLM's CPU kernels take the last adapter."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        kernel = getattr(lora_ops, name)
        if not hasattr(kernel, "__wrapped__"):
            for place in (lora_ops, torch_ops, punica_cpu):
                setattr(place, name, _without_base(kernel))


def _without_base(kernel: Callable[..., None]) -> Callable[..., None]:
    @wraps(kernel)
    def expand(
        inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, *others: Any
    ) -> None:
        """inputs: [T, rank]; indices: [T]."""
        kernel(inputs.masked_fill((indices < 0)[:, None], 0.0), weights, output, indices, *others)

    return expand


def keep_numbers_of_drafts() -> None:
    """Have speculative decoding divide logits by the request's temperature, and cut them by its
    top_p and top_k.

    vLLM's CPU kernel writes these numbers, for each draft token, into a copy that nobody reads
    (vLLM issue 55005). What the memory held before is used: draft tokens would be accepted,
    replaced and scored by another distribution, and each rank of an engine would have its own. In
    a step without draft tokens, vLLM fails to find the largest top_k of none.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expand_by_request
    constrain = rejection_sampler.apply_sampling_constraints
    if hasattr(constrain, "__wrapped__"):
        return

    @wraps(constrain)
    def constrained(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        """logits: [draft tokens, V]."""
        if not len(logits):
            return logits
        return constrain(logits, cu_num_draft_tokens, sampling_metadata)

    rejection_sampler.apply_sampling_constraints = constrained


def _expand_by_request(
    numbers: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Return a request's number for each of its tokens, [num_tokens].

    Args:
        numbers: [N], of the requests.
        cu_num_tokens: [N] int32, tokens of the requests up to this one.
        replace_from, replace_to: a number to replace, and by what.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = numbers.masked_fill(numbers == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
