"""Tensor parallelism by a model's own plan, which has a style for each module.

A style shards a module's weight over the tp axis (a DTensor) and computes with the local part, so
that matmuls never go through DTensor dispatch. Between a column-wise and a row-wise module,
activations are local to a rank. In all other places they are of own tokens (sequence_parallel.py)
or, for models where that is not possible, replicated, as are their gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from spmdrl.model.blocks import experts_parameters
from spmdrl.model.lora.layers import plus_adapter
from spmdrl.model.parallel import sequence_parallel
from spmdrl.model.parallel.collectives import Exchange, added, gathered, same, with_gradient
from spmdrl.model.parallel.tp_plan import PARTIAL, SPLIT_DIMS, tp_styles
from spmdrl.model.vision.families import vision_parameters
from spmdrl.world.torch_internals import put_parameter

log = logging.getLogger(__name__)
Forward = Callable[[Tensor], Tensor]


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return torch.cat(gathered(x, group).unbind(0), dim=-1)


def _own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


enter = with_gradient(same, added)
"""A tensor that is equal on all ranks, for local weights; the backward pass adds up gradients."""
_leave = with_gradient(added, same)
"""From partial sums to their sum over ranks; the gradient is the same on all ranks."""
gather_last = with_gradient(_gathered, _own_part)
"""From equal parts of the last dim to the whole, for the same computation on every rank; the
backward pass takes this rank's part."""
_split = with_gradient(_own_part, _gathered)
"""From the whole last dim to this rank's part; the backward pass gathers gradients."""


@dataclass(frozen=True)
class Edges:
    """What happens to activations before column-wise layers and after row-wise ones."""

    enter: Exchange
    leave: Exchange


REPLICATED = Edges(enter=enter, leave=_leave)
OWN_TOKENS = Edges(enter=same, leave=sequence_parallel.leave)


def apply_tp(hf_model: nn.Module, mesh: DeviceMesh) -> dict[str, str]:
    """Shard a meta model's modules over the tp axis by its own plan.

    Args:
        hf_model: a transformers causal LM on the meta device, changed in place; it can be divided
            over these ranks, see `divisibility.misfits`.
        mesh: one-dimensional, the tp axis.
    Returns: {parameter name: "partial" or "replicated"} for the parameters that stay whole on
        every tp rank; the gradient of a partial one is of this rank's heads or tokens only.
        Experts are left out: expert_parallel.py shards them.
    """
    styles = tp_styles(hf_model)
    reason = sequence_parallel.why_not(hf_model, styles)
    if reason and dist.get_rank() == 0:
        log.info(
            "layout.tp: %s: hidden states are whole on every tensor-parallel rank: %s",
            type(hf_model).__name__,
            reason,
        )
    edges = REPLICATED if reason else OWN_TOKENS
    partial: set[str] = set()
    for name, module in hf_model.named_modules():
        style = styles.get(name)
        if style == PARTIAL:
            is_linear = isinstance(module, nn.Linear)  # its adapter's matrices are of this kind too
            partial |= {f"{name}.{p}" for p, _ in module.named_parameters(recurse=is_linear)}
        elif style is not None:
            _apply_style(module, style, mesh=mesh, edges=edges)
            partial |= _shard_adapter(module, style, name=name, mesh=mesh)
    for name, _ in list(hf_model.named_parameters()):
        dim = SPLIT_DIMS.get(styles.get(name, PARTIAL))
        if dim is not None:  # a parameter that has a style itself: sinks, one per head
            place, _, key = name.rpartition(".")
            _shard(hf_model.get_submodule(place), key, dim=dim, mesh=mesh)
    head = hf_model.get_output_embeddings()
    embedding = hf_model.get_input_embeddings()
    is_tied = getattr(hf_model.config, "tie_word_embeddings", False)
    is_tied = is_tied or (head is not None and head.weight is embedding.weight)
    # A tied head uses the embedding's weight, which the embedding's style shards.
    if head is not None and not is_tied:
        _shard(head, "weight", dim=0, mesh=mesh)
    # The bias has an element for each row of the weight, so it is sharded only if that is.
    if getattr(head, "bias", None) is not None and hasattr(
        (embedding if is_tied else head).weight, "placements"
    ):
        _shard(head, "bias", dim=0, mesh=mesh)
    if not reason:
        partial |= sequence_parallel.shard_tokens(hf_model, styles, mesh.get_group())
        partial |= vision_parameters(hf_model)  # of what own tokens show
    experts = experts_parameters(hf_model)
    return {
        name: "partial" if name in partial else "replicated"
        for name, p in hf_model.named_parameters()
        if not hasattr(p, "placements") and name not in experts
    }


def _apply_style(module: nn.Module, style: str, *, mesh: DeviceMesh, edges: Edges) -> None:
    dim = 1 if style.startswith("rowwise") else 0
    _shard(module, "weight", dim=dim, mesh=mesh)
    if dim == 0 and getattr(module, "bias", None) is not None:
        _shard(module, "bias", dim=0, mesh=mesh)
    if style.startswith("colwise"):
        gathers = style == "colwise_gather_output"
        forward = partial(_colwise, module, gathers=gathers, enter=edges.enter)
    elif style.startswith("rowwise"):
        splits = style == "rowwise_split_input"
        forward = partial(_rowwise, module, splits=splits, leave=edges.leave)
    else:
        forward = partial(_vocab_parallel, module, module.forward, leave=edges.leave)
    module.forward = partial(forward, group=mesh.get_group())


def _shard(module: nn.Module, key: str, *, dim: int, mesh: DeviceMesh) -> None:
    whole = getattr(module, key)
    # src_data_rank=None: a meta tensor has no values to send.
    sharded = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    setattr(module, key, nn.Parameter(sharded, requires_grad=whole.requires_grad))


def _shard_adapter(module: nn.Module, style: str, *, name: str, mesh: DeviceMesh) -> set[str]:
    """Shard a layer's adapter as the layer is: B of a column-wise one, A of a row-wise one.

    Returns: the name of the other matrix, if there is an adapter. It stays whole, and each rank
        has a share of its gradient: that of its own output or input features.
    """
    if not hasattr(module, "lora_A"):
        return set()
    dim, split, whole = (
        (1, "lora_A", "lora_B") if style.startswith("rowwise") else (0, "lora_B", "lora_A")
    )
    _shard(getattr(module, split), "weight", dim=dim, mesh=mesh)
    return {f"{name}.{whole}.weight"}


def _product(module: nn.Linear) -> Callable[..., Tensor]:
    """Return what multiplies by a layer's weight, which may be stored in another form."""
    return getattr(module, "product", F.linear)


def _colwise(
    module: nn.Linear, x: Tensor, *, group: dist.ProcessGroup, gathers: bool, enter: Exchange
) -> Tensor:
    bias = None if module.bias is None else module.bias.to_local()
    x = enter(x, group)
    out = plus_adapter(module, _product(module)(x, module.weight.to_local(), bias), x=x)
    return gather_last(out, group) if gathers else out


def _rowwise(
    module: nn.Linear, x: Tensor, *, group: dist.ProcessGroup, splits: bool, leave: Exchange
) -> Tensor:
    x = _split(x, group) if splits else x
    out = plus_adapter(module, _product(module)(x, module.weight.to_local(), None), x=x)
    out = leave(out, group)
    # After the sum: if every rank added the bias before, the sum would have it R times.
    return out if module.bias is None else out + module.bias


def _vocab_parallel(
    module: nn.Embedding,
    forward: Forward,
    ids: Tensor,
    *,
    group: dist.ProcessGroup,
    leave: Exchange,
) -> Tensor:
    """Look up this rank's rows and add up the ranks. A model's scaling of embeddings (Gemma) is
    linear, so it may be done before the sum."""
    whole = module.weight
    padding = module.padding_idx
    local = whole.to_local()
    first = dist.get_rank(group) * local.shape[0]
    is_own = (ids >= first) & (ids < first + local.shape[0])
    own_padding = None if padding is None else padding - first
    # The padding row may be another rank's; its index is then out of range here.
    if own_padding is not None and not 0 <= own_padding < local.shape[0]:
        own_padding = None
    put_parameter(module, "weight", local)
    module.padding_idx = own_padding
    out = forward((ids - first).clamp(0, local.shape[0] - 1))
    put_parameter(module, "weight", whole)
    module.padding_idx = padding
    # Other ranks' ids were clamped to rows of this rank, which must not be added.
    return leave(out * is_own[..., None], group)


def sum_replicated_gradients(
    gradients: Mapping[str, Tensor], kinds: Mapping[str, str], *, group: dist.ProcessGroup
) -> None:
    """Complete the gradients of whole parameters, bit-equal on all tp ranks, in place.

    Partial gradients are summed over the ranks. Replicated ones are averaged, which changes only
    rounding, and keeps the copies from drifting apart. This is one collective per update.

    Args:
        gradients: {parameter name: local float32 gradient}.
        kinds: what `apply_tp` returned.
        group: of the tp axis.
    """
    chosen = [(gradients[name], kind) for name, kind in kinds.items() if name in gradients]
    if not chosen:
        return
    flat = torch.cat([g.reshape(-1) for g, _ in chosen])
    dist.all_reduce(flat, group=group)
    size = dist.get_world_size(group)
    at = 0
    for gradient, kind in chosen:
        total = flat[at : at + gradient.numel()].view_as(gradient)
        gradient.copy_(total if kind == "partial" else total / size)
        at += gradient.numel()
