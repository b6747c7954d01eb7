"""Packed attention behind transformers' attention interface: one row of T tokens, S sequences.

Shape letters: T packed tokens, R padded rows, B sequences of one padded group, L their padded
length, Hq query heads, Hkv key/value heads, D head dim.

The model is called as one row [1, T]; a `Packing` travels down as a keyword argument and tells
the attention where sequences begin. On the CPU (and wherever no varlen kernel applies) sequences
are padded inside attention only, in groups of similar length.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SHORT = 64
"""Up to this length plain matmuls beat the CPU's SDPA kernel (14 against 21 ms forward and
backward for 512 sequences of 16 tokens), and one padded group wastes little."""


@dataclass(frozen=True)
class Group:
    """Rows [start, start + count * length) of the padded layout: `count` sequences."""

    start: int
    count: int
    length: int


@dataclass(frozen=True)
class Packing:
    """Where sequences begin in a packed row, and how attention pads them."""

    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int  # tokens
    pad_index: Tensor  # [R] int64, packed position behind each padded row
    unpad_index: Tensor  # [T] int64, padded row of each packed position
    groups: tuple[Group, ...]


def make_packing(lengths: Sequence[int], device: torch.device, *, padded: bool) -> Packing:
    """Return the packing of sequences that lie one after another.

    Args:
        lengths: tokens per sequence, in packed order; each at least 1.
        device: of the index tensors.
        padded: build the padded layout, which varlen kernels do not need.
    """
    count = torch.tensor(lengths, dtype=torch.int64)
    cu_seqlens = F.pad(count.cumsum(0), (1, 0))
    empty = torch.empty(0, dtype=torch.int64)
    groups, pad_index, unpad_index = (), empty, empty
    if padded:
        groups, pad_index, unpad_index = _padded_layout(count, cu_seqlens)
    return Packing(
        cu_seqlens=cu_seqlens.to(torch.int32).to(device), max_seqlen=int(count.max()),
        pad_index=pad_index.to(device), unpad_index=unpad_index.to(device), groups=groups,
    )


def _padded_layout(
    lengths: Tensor, cu_seqlens: Tensor
) -> tuple[tuple[Group, ...], Tensor, Tensor]:
    order = torch.argsort(lengths, descending=True, stable=True)
    groups: list[Group] = []
    pads, rows_of, row = [], torch.empty(int(cu_seqlens[-1]), dtype=torch.int64), 0
    begin = 0
    ordered = lengths[order].tolist()
    while begin < len(ordered):
        length = ordered[begin]
        shortest = 1 if length <= _SHORT // 2 else 0.75 * length
        end = begin
        while end < len(ordered) and ordered[end] >= shortest:
            end += 1
        members = order[begin:end]
        columns = torch.arange(length)
        # Padding repeats the sequence's last token. Under a causal mask no real query sees a
        # later row, so no further mask is needed and padded rows get a zero gradient.
        inside = torch.minimum(columns[None], lengths[members][:, None] - 1)
        packed = cu_seqlens[members][:, None] + inside
        padded_rows = row + torch.arange(len(members))[:, None] * length + columns
        is_real = columns[None] < lengths[members][:, None]
        rows_of[packed[is_real]] = padded_rows[is_real]
        pads.append(packed.reshape(-1))
        groups.append(Group(row, len(members), length))
        row, begin = row + len(members) * length, end
    return tuple(groups), torch.cat(pads), rows_of


class _Pad(torch.autograd.Function):
    """Rows of a packed tensor in padded order. Both directions are plain row gathers, which
    are deterministic and about twice as fast as index_select's own index_add backward."""

    @staticmethod
    def forward(ctx, x: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return x.index_select(0, packing.pad_index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.packing.unpad_index), None


class _Unpad(torch.autograd.Function):
    """Padded rows back in packed order; padding rows get a zero gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return x.index_select(0, packing.unpad_index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.packing.pad_index.numel()
        padded = grad.new_zeros(rows, *grad.shape[1:])
        return padded.index_copy_(0, ctx.packing.unpad_index, grad.contiguous()), None


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, packing: Packing, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence, padding them inside this call only.

    Args:
        query: [1, Hq, T, D]; key, value: [1, Hkv, T, D]. Compute dtype.
        packing: of the T tokens, with its padded layout.
        scaling: factor on the scores; None is D ** -0.5.
        sliding_window: tokens that a query sees, itself included; None is all.
        softcap: scores become softcap * tanh(scores / softcap).
        model_kwargs: whatever else the model hands to attention; the interface requires it.
    Returns: [1, T, Hq, D] and None (no attention weights).
    """
    _check_supported(module, attention_mask, dropout, s_aux)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [_Pad.apply(x[0].transpose(0, 1), packing) for x in (query, key, value)]
    outputs = []
    for group in packing.groups:
        end = group.start + group.count * group.length
        q, k, v = (x[group.start:end].unflatten(0, (group.count, group.length)) for x in rows)
        out = _attend(q, k, v, scale=scale, window=sliding_window, softcap=softcap)
        outputs.append(out.flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Unpad.apply(padded, packing)[None], None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend causally over [B, L, H, D] rows of equal length; returns [B, L, Hq, D]."""
    length = q.shape[1]
    window = None if window is None or window >= length else window
    if softcap is None and (length > _SHORT or q.is_cuda):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None if window is None else _is_visible(length, window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)
    return _attend_by_matmul(q, k, v, scale=scale, window=window, softcap=softcap)


def _attend_by_matmul(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads  # query heads that read one key/value head
    q = q.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, shared * length, dim)
    k, v = (x.transpose(1, 2).reshape(batch * kv_heads, length, dim) for x in (k, v))
    is_visible = _is_visible(length, window, q.device).repeat(shared, 1)
    if softcap is None:
        bias = torch.zeros(is_visible.shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(~is_visible, float("-inf"))
        scores = torch.baddbmm(bias[None], q, k.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)) * scale
        scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~is_visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    out = torch.bmm(weights, v).view(batch, kv_heads, shared, length, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _is_visible(length: int, window: int | None, device: torch.device) -> Tensor:
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() if window is None else ones.tril().triu(1 - window)


def varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, packing: Packing, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence by torch's varlen kernel (CUDA, bfloat16).

    Shapes as `padded_attention`. Serves torch 2.11 (is_causal) to 2.13 (window_size).
    """
    from torch.nn.attention.varlen import varlen_attn

    _check_supported(module, attention_mask, dropout, s_aux)
    assert softcap is None, "pick_attention never pairs varlen with softcap"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    known = _varlen_parameters()
    options: dict[str, object] = {"scale": scaling}
    if "window_size" in known:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    elif sliding_window is not None and sliding_window < packing.max_seqlen:
        raise ValueError(
            f"model.kernels.attention: varlen of torch {torch.__version__} has no sliding window "
            f"and the model's is {sliding_window} tokens; set it to flash or padded"
        )
    else:
        options["is_causal"] = True
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    cu, longest = packing.cu_seqlens, packing.max_seqlen
    return varlen_attn(q, k, v, cu, cu, longest, longest, **options)[None], None


def _varlen_parameters() -> set[str]:
    from torch.nn.attention.varlen import varlen_attn

    return set(inspect.signature(varlen_attn).parameters)


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, packing: Packing, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence by flash-attn 2 (CUDA, bfloat16).

    Shapes as `padded_attention`.
    """
    from flash_attn import flash_attn_varlen_func

    _check_supported(module, attention_mask, dropout, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu, longest = packing.cu_seqlens, packing.max_seqlen
    out = flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, softmax_scale=scaling, causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[None], None


def _check_supported(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, s_aux: Tensor | None
) -> None:
    """Refuse what packed attention would silently leave out."""
    for is_present, what in (
        (attention_mask is not None, "an attention mask"),
        (dropout, f"attention dropout {dropout}"),
        (s_aux is not None, "attention sinks"),
        (not getattr(module, "is_causal", True), "bidirectional attention"),
    ):
        if is_present:
            raise ValueError(
                f"model: {type(module).__name__} asks for {what}, which packed attention does "
                "not do; this model cannot be trained here"
            )


KERNELS = {
    "padded": padded_attention, "varlen": varlen_attention, "flash": flash_attention,
}


def register_attention() -> None:
    """Make the kernels known to transformers as spmdrl_padded, spmdrl_varlen, spmdrl_flash.

    No mask function goes with them: for a name it has no mask function for, transformers
    builds no mask at all, which spares its search for sequence borders in `position_ids`.
    """
    from transformers import AttentionInterface

    for name, function in KERNELS.items():
        AttentionInterface.register(f"spmdrl_{name}", function)


def pick_attention(
    wanted: str, *, device: torch.device, dtype: torch.dtype, has_softcap: bool
) -> str:
    """Return the kernel for `model.kernels.attention`: padded, varlen or flash.

    Raises: ValueError when the one asked for cannot serve this device, dtype or model.
    """
    fits_kernels = device.type == "cuda" and dtype == torch.bfloat16
    if wanted == "auto":
        return "varlen" if fits_kernels and not has_softcap else "padded"
    if wanted != "padded" and not fits_kernels:
        raise ValueError(
            f"model.kernels.attention: {wanted} needs CUDA and compute_dtype bfloat16, this run "
            f"has {device.type} and {str(dtype).removeprefix('torch.')}; set it to auto or padded"
        )
    if wanted == "varlen" and has_softcap:
        raise ValueError("model.kernels.attention: varlen has no softcap and this model needs it; "
                         "set it to flash, padded or auto")
    return wanted
