"""Packed attention behind transformers' attention interface: one row of T tokens, S sequences.

Shape letters: T packed tokens, K packed keys (T of them, unless said otherwise), R padded rows, B
sequences of one padded group, L their padded length, Hq query heads, Hkv key/value heads, D head
dim.

The model is called as one row [1, T]; a `Packing` travels down as a keyword argument and tells
the attention where sequences begin. On the CPU (and wherever no varlen kernel applies) sequences
are padded inside attention only, in groups of similar length.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SHORT = 64
"""Up to this length plain matmuls beat the CPU's SDPA kernel (14 against 21 ms forward and
backward for 512 sequences of 16 tokens), and one padded group wastes little."""


@dataclass(frozen=True)
class Group:
    """Rows [start, start + count * length) of the padded queries, and their keys' likewise:
    `count` sequences. Queries are the last tokens of a sequence whose keys are longer."""

    count: int
    start: int
    length: int
    key_start: int
    key_length: int


@dataclass(frozen=True)
class Packing:
    """Where sequences begin in a packed row, and how attention pads them."""

    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int  # tokens
    pad_index: Tensor  # [R] int64, packed position behind each padded row
    unpad_index: Tensor  # [T] int64, padded row of each packed position
    groups: tuple[Group, ...]
    keys: Packing | None = None
    """Of the keys, where they are not the queries' own tokens: its index tensors serve, not its
    groups."""

    @property
    def of_keys(self) -> Packing:
        """Where sequences begin among the keys."""
        return self.keys or self


def make_packing(
    lengths: Sequence[int],
    device: torch.device,
    *,
    padded: bool,
    key_lengths: Sequence[int] | None = None,
) -> Packing:
    """Return the packing of sequences that lie one after another.

    Args:
        lengths: tokens per sequence, in packed order; each at least 1.
        device: of the index tensors.
        padded: build the padded layout, which varlen kernels do not need.
        key_lengths: tokens of each sequence's keys, of which the last are its queries' own; None
            where they are the same tokens.
    """
    count = torch.tensor(lengths, dtype=torch.int64)
    others = count if key_lengths is None else torch.tensor(key_lengths, dtype=torch.int64)
    members = _alike(count, others) if padded else []
    starts, packing = _pack(count, members, device=device)
    key_starts, keys = (
        (starts, None) if key_lengths is None else _pack(others, members, device=device)
    )
    groups = tuple(
        Group(
            len(own),
            start=start,
            length=int(count[own].max()),
            key_start=key_start,
            key_length=int(others[own].max()),
        )
        for own, start, key_start in zip(members, starts, key_starts)
    )
    return replace(packing, groups=groups, keys=keys)


def _alike(lengths: Tensor, key_lengths: Tensor) -> list[Tensor]:
    """Return groups of sequences of similar length; one with keys of its own length is alone."""
    order = torch.argsort(lengths, descending=True, stable=True)
    is_own = (lengths == key_lengths)[order]
    groups = [*order[~is_own][:, None]]
    order = order[is_own]
    begin, ordered = 0, lengths[order].tolist()
    while begin < len(ordered):
        shortest = 1 if ordered[begin] <= _SHORT // 2 else 0.75 * ordered[begin]
        end = begin
        while end < len(ordered) and ordered[end] >= shortest:
            end += 1
        groups.append(order[begin:end])
        begin = end
    return groups


def _pack(
    lengths: Tensor, groups: Sequence[Tensor], *, device: torch.device
) -> tuple[list[int], Packing]:
    """Return where each group's padded rows start, and the packing without its groups."""
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    starts, row, empty = [], 0, torch.empty(0, dtype=torch.int64)
    pads = [empty]
    rows_of = torch.empty(int(cu_seqlens[-1]) if groups else 0, dtype=torch.int64)
    for members in groups:
        columns = torch.arange(int(lengths[members].max()))
        # Padding repeats the sequence's last token. Under a causal mask no real query sees a
        # later row, so no further mask is needed and padded rows get a zero gradient.
        inside = torch.minimum(columns[None], lengths[members][:, None] - 1)
        packed = cu_seqlens[members][:, None] + inside
        padded_rows = row + torch.arange(packed.numel()).view(packed.shape)
        is_real = columns[None] < lengths[members][:, None]
        rows_of[packed[is_real]] = padded_rows[is_real]
        pads.append(packed.reshape(-1))
        starts.append(row)
        row += packed.numel()
    return starts, Packing(
        cu_seqlens=cu_seqlens.to(torch.int32).to(device),
        max_seqlen=int(lengths.max()),
        pad_index=torch.cat(pads).to(device),
        unpad_index=rows_of.to(device),
        groups=(),
    )


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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence, padding them inside this call only.

    Args:
        query: [1, Hq, T, D]; key: [1, Hkv, K, D]; value: [1, Hkv, K, Dv], of D or another head
            dim. Compute dtype.
        packing: of the T tokens and the K keys, with its padded layout.
        scaling: factor on the scores; None is D ** -0.5.
        sliding_window: tokens that a query sees, itself included; None is all.
        softcap: scores become softcap * tanh(scores / softcap).
        model_kwargs: whatever else the model hands to attention; the interface requires it.
    Returns: [1, T, Hq, Dv] and None (no attention weights).
    """
    check_supported(module, attention_mask, dropout, s_aux)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = _Pad.apply(query[0].transpose(0, 1), packing)
    keys, values = (_Pad.apply(x[0].transpose(0, 1), packing.of_keys) for x in (key, value))
    outputs = []
    for group in packing.groups:
        q = _rows(queries, group.start, group.length, count=group.count)
        k, v = (
            _rows(x, group.key_start, group.key_length, count=group.count) for x in (keys, values)
        )
        out = _attend(q, k, v, scale=scale, window=sliding_window, softcap=softcap)
        outputs.append(out.flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Unpad.apply(padded, packing)[None], None


def _rows(x: Tensor, start: int, length: int, *, count: int) -> Tensor:
    return x[start : start + count * length].unflatten(0, (count, length))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend causally over [B, L, H, D] rows of equal length; returns [B, L, Hq, D].

    Where keys are longer, the queries are their last tokens.
    """
    length, keys = q.shape[1], k.shape[1]
    window = None if window is None or window >= keys else window
    if softcap is None and (keys > _SHORT or q.is_cuda):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        is_plain = window is None and length == keys
        mask = None if is_plain else _is_visible(length, keys, window=window, device=q.device)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)
    return _attend_by_matmul(q, k, v, scale=scale, window=window, softcap=softcap)


def _attend_by_matmul(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    batch, length, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    shared = heads // kv_heads  # query heads that read one key/value head
    q = q.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, shared * length, dim)
    k, v = (x.transpose(1, 2).reshape(batch * kv_heads, keys, -1) for x in (k, v))
    is_visible = _is_visible(length, keys, window=window, device=q.device).repeat(shared, 1)
    if softcap is None:
        bias = torch.zeros(is_visible.shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(~is_visible, float("-inf"))
        scores = torch.baddbmm(bias[None], q, k.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)) * scale
        scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~is_visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    out = torch.bmm(weights, v).view(batch, kv_heads, shared, length, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads, -1)


def _is_visible(length: int, keys: int, *, window: int | None, device: torch.device) -> Tensor:
    """Return [length, keys] bool: what the last `length` tokens see of all `keys`."""
    before = keys - length
    seen = torch.ones(length, keys, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before + 1 - window)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence by torch's varlen kernel (CUDA, bfloat16).

    Shapes as `padded_attention`. Serves torch 2.11 (is_causal) to 2.13 (window_size).
    """
    from torch.nn.attention.varlen import varlen_attn

    check_supported(module, attention_mask, dropout, s_aux)
    assert softcap is None, "pick_attention never pairs varlen with softcap"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    known = _varlen_parameters()
    options: dict[str, object] = {"scale": scaling}
    if "window_size" in known:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    elif sliding_window is not None and sliding_window < packing.of_keys.max_seqlen:
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
    of_keys = packing.of_keys
    out = varlen_attn(
        q,
        k,
        _widened(v, q),
        packing.cu_seqlens,
        of_keys.cu_seqlens,
        packing.max_seqlen,
        of_keys.max_seqlen,
        **options,
    )
    return out[None, ..., : v.shape[-1]], None


def _widened(values: Tensor, query: Tensor) -> Tensor:
    """Return values with zeros up to the head dim of the queries, as the kernels want."""
    missing = query.shape[-1] - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values


def _varlen_parameters() -> set[str]:
    from torch.nn.attention.varlen import varlen_attn

    return set(inspect.signature(varlen_attn).parameters)


def flash_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence by flash-attn 2 (CUDA, bfloat16).

    Shapes as `padded_attention`.
    """
    from flash_attn import flash_attn_varlen_func

    check_supported(module, attention_mask, dropout, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    of_keys = packing.of_keys
    out = flash_attn_varlen_func(
        q,
        k,
        _widened(v, q),
        packing.cu_seqlens,
        of_keys.cu_seqlens,
        packing.max_seqlen,
        of_keys.max_seqlen,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[None, ..., : v.shape[-1]], None


def check_supported(
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


KERNELS = {"padded": padded_attention, "varlen": varlen_attention, "flash": flash_attention}


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
        raise ValueError(
            "model.kernels.attention: varlen has no softcap and this model needs it; "
            "set it to flash, padded or auto"
        )
    return wanted
