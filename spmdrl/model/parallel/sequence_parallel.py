"""Sequence parallelism with tensor parallelism: tokens are sharded between attention and MLP.

A row-wise layer ends in a reduce-scatter, so that each tensor-parallel rank has the sums of its own
tokens only. Norms and residuals are then computed and stored once instead of on every rank. The
input of attention or MLP is gathered once for all of its projections. The bytes sent are those of
tensor parallelism alone. A mixture of experts is computed for own tokens; every rank has the whole
router and shared experts. So are the projections of a layer with a state, whose ranks exchange
tokens for heads in between (state_exchange.py). Source: arXiv 2205.05198, section 4.2.2.

Shape letters: T tokens of a slice of the packed row, a multiple of the R tensor-parallel ranks; H.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.model.attention.state_layers import supports_packed_states
from spmdrl.model.blocks import base_of, blocks, mixtures
from spmdrl.model.parallel.collectives import gathered, scattered_sum, with_gradient
from spmdrl.model.parallel.tp_plan import PARTIAL, of_own_tokens

_PARTS = {"self_attn": "attention", "mlp": "MLP", "feed_forward": "MLP", "mixer": "either"}
"""Names of a block's parts, and which part it is. Nemotron-H's blocks have one, `mixer`."""


def _all_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, T/R, H] of each rank to [1, T, H]."""
    return gathered(x.squeeze(0), group).flatten(0, 1)[None]


def _added_own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, T, H] of each rank to the sum over ranks of own tokens, [1, T/R, H]."""
    return scattered_sum(x.squeeze(0).unflatten(0, (dist.get_world_size(group), -1)), group)[None]


def _own_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


_enter = with_gradient(_all_tokens, _added_own)
"""From own tokens to all; the backward pass adds up the ranks' gradients."""
leave = with_gradient(_added_own, _all_tokens)
"""From partial sums of all tokens, [1, T, H], to the sums of own tokens, [1, T/R, H]."""
_own = with_gradient(_own_tokens, _all_tokens)
"""From all tokens, the same on every rank, to own ones; the backward pass gathers gradients."""
_all = with_gradient(_all_tokens, _own_tokens)
"""From own tokens to all, for a computation that is the same on every rank."""


def why_not(hf_model: nn.Module, styles: Mapping[str, str]) -> str:
    """Return why a model's tokens cannot be sharded; empty if they can.

    They can if blocks consist of attention, an MLP or mixture of experts, and norms; if all
    matrices of attention and MLP are split or have their gradients added up, so that every rank
    has a part of the gradient of the input; and if only an embedding and norms are outside.

    Args:
        styles: what `tp_plan.tp_styles` returned.
    """
    inside = blocks(hf_model)
    apart = of_own_tokens(hf_model)
    for place, block in inside.items():
        for name, child in block.named_children():
            where = f"{place}.{name}"
            if where in apart:
                continue
            if name not in _PARTS and not _is_norm(child):
                return f"{where} is neither attention, MLP nor norm"
            if name in _PARTS and (key := _unsplit(child, where, styles)):
                return f"{where}.{key} is not split"
        # What is computed for own tokens counts as the MLP, but a layer with a state as attention.
        parts = {kind for part, kind in _PARTS.items() if hasattr(block, part)}
        for name, child in block.named_children():
            if f"{place}.{name}" in apart:
                parts.add("attention" if supports_packed_states(child) else "MLP")
        if len(parts) < 2 and not hasattr(block, "mixer"):
            return f"{place} has no attention or no MLP"
    embedding = hf_model.get_input_embeddings()
    prefix, base = base_of(hf_model)
    for name, child in base.named_children():
        where = f"{prefix}.{name}"
        holds_blocks = any(place.startswith(f"{where}.") for place in inside)
        if child is not embedding and not holds_blocks and not _is_norm(child):
            return f"{where} is neither embedding, blocks nor norm"
    return ""


def _unsplit(part: nn.Module, where: str, styles: Mapping[str, str]) -> str:
    """Return the first matrix of a block's part that no style splits; empty for none."""
    for key, own in part.named_parameters():
        style = styles.get(f"{where}.{key.rpartition('.')[0]}", "")
        is_split = style == PARTIAL or style.startswith(("colwise", "rowwise"))
        if own.dim() > 1 and ".lora_" not in key and not is_split:
            return key
    return ""


def _is_norm(module: nn.Module) -> bool:
    return all(own.dim() == 1 for own in module.parameters())


def shard_tokens(
    hf_model: nn.Module, styles: Mapping[str, str], group: dist.ProcessGroup
) -> set[str]:
    """Shard the tokens of a tensor-parallel model between attention and MLP.

    Args:
        hf_model: changed in place; `why_not` returned nothing for it, and its row-wise layers and
            vocabulary-parallel embedding end in `leave`.
        styles: what `tp_plan.tp_styles` returned.
    Returns: the names of parameters that are whole on every rank and get own tokens only: norms,
        biases of row-wise layers, routers and shared experts.
    """
    partial = {f"{name}.bias" for name, style in styles.items() if style.startswith("rowwise")}
    embedding = hf_model.get_input_embeddings()
    _, base = base_of(hf_model)
    whole = {id(p) for p in embedding.parameters()}
    apart = mixtures(hf_model).values()
    for block in blocks(hf_model).values():
        for part in _PARTS:
            module = getattr(block, part, None)
            if module is None or any(module is mixture for mixture in apart):
                continue
            if supports_packed_states(module):
                continue
            module.forward = functools.partial(_entered, module.forward, group)
            whole |= {id(p) for p in module.parameters()}
        for child in block.children():
            if supports_packed_states(child):
                child.tensor_group = group  # type: ignore[assignment]
    # A vocabulary-parallel embedding returns own tokens already: it ends in `leave`.
    if not hasattr(embedding.weight, "placements"):
        embedding.forward = functools.partial(_cut, embedding.forward, group)
    base.forward = functools.partial(_gathered_output, base.forward, group)
    own = {id(p) for p in base.parameters()} - whole
    return partial | {name for name, p in hf_model.named_parameters() if id(p) in own}


def _entered(forward: Callable, group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
    # Blocks pass hidden states by position or by name.
    if args:
        return forward(_enter(args[0], group), *args[1:], **options)
    states = _enter(options.pop("hidden_states"), group)
    return forward(hidden_states=states, **options)


def _cut(forward: Callable, group: dist.ProcessGroup, ids: Tensor) -> Tensor:
    return _own(forward(ids), group)


def _gathered_output(forward: Callable, group: dist.ProcessGroup, **options: Any) -> Any:
    output = forward(**options)
    output.last_hidden_state = _all(output.last_hidden_state, group)
    return output
