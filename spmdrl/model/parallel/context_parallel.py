"""Attention under context parallelism, where each rank has a slice of every packed row.

For slices see row_slices.py. Ranks exchange tokens for attention in one of three ways:

- ulysses: a rank gives tokens of all heads for all tokens of some heads, and gets its tokens back
  (arXiv 2309.14509). Any kernel can be used, since each rank has whole sequences. The number of
  query heads must be a multiple of the ranks.
- gather: a rank's queries attend to the keys and values of the whole row. These are gathered for
  ceil(Hkv / R) heads at a time, and again in the backward pass (arXiv 2407.21783, section 3.3.2).
  They take as much memory as all heads of the own slice if R divides Hkv, and more otherwise: with
  fewer heads than ranks, R / Hkv times as much. Any number of heads.
- ring: keys and values are passed from rank to rank, while each rank attends to those that it has
  (arXiv 2310.01889; ring_attention.py). Any number of heads, with two slices of keys at most.

Shape letters: T tokens of the padded row, t of a slice, R ranks, H heads, Hkv key/value heads, D
head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmdrl.model.attention.kernels import KERNELS, check_supported
from spmdrl.model.attention.mask_patterns import mask_pattern_of
from spmdrl.model.attention.packing import Packing
from spmdrl.model.parallel import ring_attention as ring
from spmdrl.model.parallel.collectives import gather, swap
from spmdrl.model.parallel.row_slices import SlicedPacking
from spmdrl.model.tensor_parts import to_local

Kernel = Callable[..., tuple[Tensor, None]]


def in_row_order(slices: Tensor) -> Tensor:
    """Return [H, T, D] in the row's order from the ranks' slices [R, H, t, D]."""
    first, second = slices.unflatten(2, (2, -1)).unbind(2)
    # Rank r has chunks r and 2R - 1 - r: in order of rank, the second chunks go backwards.
    return torch.cat([first, second.flip(0)]).transpose(0, 1).flatten(1, 2)


def by_rank(row: Tensor, *, size: int) -> Tensor:
    """Return the slices of `size` ranks, [R, H, t, D], of a row [H, T, D]."""
    chunks = row.unflatten(1, (2 * size, -1)).transpose(0, 1)
    return torch.stack([chunks[:size], chunks[size:].flip(0)], dim=2).flatten(2, 3)


@dataclass(frozen=True)
class Attend:
    """A kernel, with its arguments other than query, key and value."""

    kernel: Kernel
    """Of KERNELS."""
    module: nn.Module
    attention_mask: Tensor | None
    options: Mapping[str, Any]

    sinks: Tensor | None
    """[Hq], the kernel's s_aux, of this rank's heads."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, sinks: Tensor | None
    ) -> Tensor:
        """Return [1, T, Hq, Dv] for queries [1, Hq, T, D], with keys, values and sinks."""
        inputs = (self.module, query, key, value, self.attention_mask)
        return self.kernel(*inputs, packing=packing, s_aux=sinks, **self.options)[0]


def _method(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    method: Callable[[Tensor, Tensor, Tensor, SlicedPacking, Attend], Tensor],
    kernel: Kernel,
    packing: SlicedPacking,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend from a slice to its row.

    Args:
        query: [1, Hq, t, D]; key: [1, Hkv, t, D]; value: [1, Hkv, t, Dv].
        method: how the ranks exchange. kernel: of KERNELS.
        options: of the kernel, and other arguments of the model to attention.
    Returns: [1, t, Hq, Dv] and None.
    """
    attend = Attend(kernel, module, attention_mask, options, to_local(s_aux))
    # Some models view what attention returns in another shape.
    return method(query, key, value, packing, attend).contiguous(), None


def _ulysses(
    query: Tensor, key: Tensor, value: Tensor, packing: SlicedPacking, attend: Attend
) -> Tensor:
    """Attend over whole sequences with a part of the heads.

    Hq is a multiple of the ranks; key and value heads are repeated until they are, too.
    Source: arXiv 2309.14509, section 3.
    """
    group = packing.group
    size = dist.get_world_size(packing.group)
    # Copies of a head lie next to each other, as the query heads that share it do.
    copies = math.lcm(key.shape[1], size) // key.shape[1]
    key, value = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key, value))
    q, k, v = (
        in_row_order(swap(x.squeeze(0).unflatten(0, (size, -1)), group))[None]
        for x in (query, key, value)
    )
    sinks = attend.sinks
    if sinks is not None:
        sinks = sinks.unflatten(0, (size, -1))[dist.get_rank(group)]
    slices = by_rank(attend(q, k, v, packing.whole, sinks).squeeze(0).transpose(0, 1), size=size)
    return swap(slices, group).flatten(0, 1).transpose(0, 1)[None]


def _gathered(
    query: Tensor, key: Tensor, value: Tensor, packing: SlicedPacking, attend: Attend
) -> Tensor:
    """Attend with own queries to the keys of the whole row, for a few heads at a time.

    Source: arXiv 2407.21783, section 3.3.2.
    """
    kv_heads = key.shape[1]
    size = dist.get_world_size(packing.group)
    sinks = attend.sinks
    shared = query.shape[1] // kv_heads
    # If the ranks divide the heads, `step` heads of the row are as large as all of the slice's.
    step = -(-kv_heads // size)
    outputs = [
        # Gathered keys and values are not saved; attention has no dropout, so no RNG state is.
        checkpoint(
            _gathered_heads,
            query[:, start * shared : (start + step) * shared],
            *(x[:, start : start + step] for x in (key, value)),
            None if sinks is None else sinks[start * shared : (start + step) * shared],
            packing,
            attend,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, kv_heads, step)
    ]
    return torch.cat(outputs, dim=2)


def _gathered_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    packing: SlicedPacking,
    attend: Attend,
) -> Tensor:
    keys, values = (in_row_order(gather(x.squeeze(0), packing.group))[None] for x in (key, value))
    outputs = []
    for own, chunk in zip(query.chunk(2, dim=2), packing.chunks):
        seen = slice(chunk.first_key, chunk.end)
        outputs.append(attend(own, keys[:, :, seen], values[:, :, seen], chunk.packing, sinks))
    return torch.cat(outputs, dim=1)


def _ring(
    query: Tensor, key: Tensor, value: Tensor, packing: SlicedPacking, attend: Attend
) -> Tensor:
    """Attend with own queries to keys that are passed from rank to rank.

    Layers with a sliding window or a softcap use `_gathered`. With the padded kernel, ring
    attention computes matrix products in float32; with others, torch's flash attention.
    """
    options = attend.options
    # A tile's keys are all visible or causal: it has no window. Its kernels have no softcap.
    if mask_pattern_of(attend.module).window is not None or options.get("softcap") is not None:
        return _gathered(query, key, value, packing, attend)
    check_supported(attend.module, attend.attention_mask, options)
    scaling = options.get("scaling")
    out = ring.Ring.apply(
        *(x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value)),
        packing.rounds,
        packing.group,
        ring.DENSE if attend.kernel is KERNELS["padded"] else ring.FLASH,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        attend.sinks,
    )
    return out[None]


METHODS = {
    name: partial(_method, method=method)
    for name, method in (("ulysses", _ulysses), ("gather", _gathered), ("ring", _ring))
}


def register_context_attention() -> None:
    """Make kernels with each method known to transformers, as spmdrl_padded_ulysses and so on."""
    from transformers import AttentionInterface

    for kernel, function in KERNELS.items():
        for method, attend in METHODS.items():
            AttentionInterface.register(
                f"spmdrl_{kernel}_{method}", partial(attend, kernel=function)
            )
