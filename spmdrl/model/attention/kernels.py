"""Packed attention for transformers' attention interface: one row of T tokens, S sequences.

Shape letters: T packed tokens, K packed keys (usually K = T), B sequences of one padded group, L
their padded length, Hq query heads, Hkv key/value heads, D head dim.

The model computes one row [1, T]. It passes a `Packing` as a keyword argument to attention, which
says where sequences begin. On the CPU, and where no varlen kernel can be used, attention pads
sequences in groups of similar length; all other layers compute packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.attention.mask_patterns import mask_pattern_of
from spmdrl.model.attention.packing import SHORT, Packing, pad, unpad
from spmdrl.model.attention.sinks import FlashWithSinks, with_sink_keys, with_sink_scores
from spmdrl.model.exact import attention as exact
from spmdrl.model.tensor_parts import to_local
from spmdrl.world.torch_internals import varlen

LARGEST_HEAD = 256
"""Elements of the largest heads that FlashAttention takes."""
CHOOSING = ("indices", "block_indices", "position_bias")
"""Keyword arguments, other than the mask, by which models choose or weigh keys."""


@dataclass(frozen=True)
class Weighing:
    """How attention weights are computed from queries and keys."""

    scale: float | None
    """Factor of the scores; None: D ** -0.5."""
    window: int | None
    """Tokens that a query attends to, itself included; None: all."""
    softcap: float | None
    """Scores become softcap * tanh(scores / softcap)."""
    sinks: Tensor | None = None
    """[Hq], for each head the score of a key whose value is zero; None: no sinks."""

    def scale_of(self, query: Tensor) -> float:
        """Return the factor for queries [.., D]."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Temperature:
    """A factor of queries that grows with their position (Llama 4; arXiv 2501.19399).

    1 + scale * log(1 + floor((position + 1) / length)), positions from 0.
    """

    length: float  # tokens
    scale: float

    def applied(self, query: Tensor, places: Tensor) -> Tensor:
        """Return queries [1, Hq, T, D] at positions [T], scaled."""
        factors = torch.log1p(torch.floor((places.float() + 1) / self.length)) * self.scale + 1
        return (query * factors[:, None]).to(query.dtype)


def _kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Callable[[Tensor, Tensor, Tensor, Packing, Weighing], Tensor],
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence.

    Args:
        query: [1, Hq, T, D]; key: [1, Hkv, K, D]; value: [1, Hkv, K, Dv], of D or another head
            dim. Compute dtype.
        attend: takes them as [T, Hq, D] and so on, and returns [T, Hq, Dv].
        module: has a mask pattern from `enable_packing`.
        packing: of the T tokens and the K keys; with the padded layout for a kernel that pads.
        s_aux: [Hq], attention sinks; sharded over tp as the heads are.
        model_kwargs: other arguments of the model to attention, which the interface requires.
    Returns: [1, T, Hq, Dv] and None (no attention weights).
    """
    asked = {"dropout": dropout, "softcap": softcap, "s_aux": s_aux, **model_kwargs}
    check_supported(module, attention_mask, asked)
    if (temperature := getattr(module, "temperature", None)) is not None:
        query = temperature.applied(query, packing.places(query.shape[2]))
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    pattern = mask_pattern_of(module)
    packing = packing.in_chunks if pattern.chunk else packing
    how = Weighing(scaling, pattern.window, softcap, to_local(s_aux))
    # Some models view what attention returns in another shape, as they may of transformers' own.
    return attend(q, k, v, packing, how)[None].contiguous(), None


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    how: Weighing,
    *,
    attend: Callable[[Tensor, Tensor, Tensor, Weighing, Tensor | None], Tensor],
) -> Tensor:
    """Attend with sequences padded inside this call; any device.

    Args:
        attend: over padded rows, as `_attend` does.
    """
    queries = pad(q, packing)
    keys, values = (packing.padded_keys(x) for x in (k, v))
    outputs = []
    for group in packing.groups:
        rows = _rows(queries, group.start, group.length, count=group.count)
        k_rows, v_rows = (
            _rows(x, group.key_start, group.key_length, count=group.count) for x in (keys, values)
        )
        spans = packing.spans
        if spans is not None:
            spans = _rows(spans, group.start, group.length, count=group.count)
        outputs.append(attend(rows, k_rows, v_rows, how, spans).flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return unpad(padded, packing)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, how: Weighing) -> Tensor:
    """Attend by torch's varlen kernel (CUDA, bfloat16)."""
    assert how.softcap is None, "pick_attention never pairs varlen with softcap"
    assert packing.spans is None, "pick_attention never pairs varlen with spans"
    ends, longest = _bounds(packing)
    k = packing.keys_in_order(k)
    wide = widened(packing.keys_in_order(v), q)
    if how.sinks is None:
        out = varlen(q, k, wide, ends=ends, longest=longest, scale=how.scale, window=how.window)
    else:
        scale = how.scale_of(q)
        out = FlashWithSinks.apply(q, k, wide, how.sinks, ends, longest, scale, how.window)
    return out[..., : v.shape[-1]]


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, how: Weighing) -> Tensor:
    """Attend by flash-attn 2 (CUDA, bfloat16); by torch's kernel with sinks, which it lacks."""
    assert packing.spans is None, "pick_attention never pairs flash with spans"
    if how.sinks is not None:
        return _varlen(q, k, v, packing, how)
    from flash_attn import flash_attn_varlen_func

    ends, longest = _bounds(packing)
    out = flash_attn_varlen_func(
        q,
        packing.keys_in_order(k),
        widened(packing.keys_in_order(v), q),
        *ends,
        *longest,
        softmax_scale=how.scale,
        causal=True,
        # flash-attn does not count the query itself.
        window_size=(-1, -1) if how.window is None else (how.window - 1, 0),
        softcap=how.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[..., : v.shape[-1]]


def _bounds(packing: Packing) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return where sequences end, and the longest length, of queries and of keys."""
    keys = packing.of_keys
    return (packing.cu_seqlens, keys.cu_seqlens), (packing.max_seqlen, keys.max_seqlen)


def widened(values: Tensor, like: Tensor) -> Tensor:
    """Return values padded with zeros to the head dim of queries or keys, as kernels require."""
    missing = like.shape[-1] - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values


def _rows(x: Tensor, start: int, length: int, *, count: int) -> Tensor:
    return x[start : start + count * length].unflatten(0, (count, length))


def _attend(q: Tensor, k: Tensor, v: Tensor, how: Weighing, spans: Tensor | None = None) -> Tensor:
    """Attend causally over [B, L, H, D] rows of equal length; returns [B, L, Hq, D].

    Where keys are longer, the queries are their last tokens.

    Args:
        spans: [B, L], whose tokens see each other; see Packing.
    """
    length = q.shape[1]
    keys = k.shape[1]
    # A window that holds all keys needs no mask.
    window = None if how.window is None or how.window >= keys else how.window
    mask = None
    if spans is not None:
        assert how.softcap is None, "pick_attention never pairs spans with softcap"
        mask = _seen_with(spans, window)[:, None]
    elif is_by_matmul(keys, has_softcap=how.softcap is not None, on_gpu=q.is_cuda):
        visible = _is_visible(length, keys, window=window, device=q.device)
        return _attend_by_matmul(q, k, v, visible, how)
    elif window is not None or length != keys:
        mask = _is_visible(length, keys, window=window, device=q.device)
    shared = q.shape[2] // k.shape[2]
    fits_flash = q.dtype != torch.float32 and mask is None and q.shape[3] <= LARGEST_HEAD
    if shared > 1 and q.device.type != "cpu" and not fits_flash:
        # The only other kernel that does not hold all scores [B, Hq, L, K] has no grouped heads.
        k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    scale = how.scale_of(q)
    if how.sinks is not None:
        return _attend_with_sinks(q, k, v, mask, sinks=how.sinks, scale=scale)
    return _sdpa(q, k, v, mask, scale=scale)


def is_by_matmul(keys: int, *, has_softcap: bool, on_gpu: bool) -> bool:
    """Return whether padded attention over that many keys is plain matmuls, which save all scores.

    SDPA has no softcap, and on the CPU it is slower for short rows.
    """
    return has_softcap or (keys <= SHORT and not on_gpu)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, sinks: Tensor, scale: float
) -> Tensor:
    """Attend with the sinks as a first key, which is visible to all queries.

    Without a mask a first query is added as well, because a causal kernel needs as many queries
    as keys.
    """
    width = v.shape[-1]
    is_causal = mask is None
    q, k, v = with_sink_keys(q, k, v, sinks, scale=scale)
    if is_causal:
        return _sdpa(F.pad(q, (0, 0, 0, 0, 1, 0)), k, v, None, scale=scale)[:, 1:, :, :width]
    return _sdpa(q, k, v, F.pad(mask, (1, 0), value=True), scale=scale)[..., :width]


def _attend_by_matmul(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor, how: Weighing) -> Tensor:
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    scale = how.scale_of(q)
    shared = heads // kv_heads  # query heads that read one key/value head
    q = q.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, shared * length, dim)
    k, v = (x.transpose(1, 2).reshape(batch * kv_heads, x.shape[1], -1) for x in (k, v))
    # Rows are the queries of the first of these heads, then of the second, and so on.
    is_visible = is_visible.repeat(shared, 1)
    if how.softcap is None:
        bias = torch.zeros(is_visible.shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(~is_visible, float("-inf"))
        scores = torch.baddbmm(bias[None], q, k.transpose(1, 2), alpha=scale)
    else:
        scores = capped(torch.bmm(q, k.transpose(1, 2)) * scale, how.softcap, is_visible)
    if how.sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        weights = with_sink_scores(scores, how.sinks, kv_heads=kv_heads)
    out = torch.bmm(weights.to(v.dtype), v).view(batch, kv_heads, shared, length, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads, -1)


def capped(scores: Tensor, softcap: float, is_visible: Tensor) -> Tensor:
    """Return scores after the softcap, -inf where a key is not visible."""
    return (torch.tanh(scores / softcap) * softcap).masked_fill(~is_visible, float("-inf"))


def _is_visible(length: int, keys: int, *, window: int | None, device: torch.device) -> Tensor:
    """Return [length, keys] bool: which of all keys are visible to the last `length` tokens."""
    before = keys - length
    seen = torch.ones(length, keys, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before + 1 - window)


def _seen_with(spans: Tensor, window: int | None) -> Tensor:
    """Return [B, L, L] bool: all tokens before each token, and those of its own span."""
    length = spans.shape[1]
    is_own = (spans[:, :, None] == spans[:, None]) & (spans[:, None] >= 0)
    before = _is_visible(length, length, window=None, device=spans.device)
    seen = before | is_own
    return seen if window is None else seen.triu(1 - window)


def _attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, how: Weighing, spans: Tensor | None = None
) -> Tensor:
    """Attend as `_attend` does, with bits that do not depend on other sequences."""
    assert spans is None, "engine.exact is refused with images"
    return _Exact.apply(q, k, v, how.sinks, how)


class _Exact(torch.autograd.Function):
    """Forward by exact/attention.py; backward by the gradient of `_attend`, computed again."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Weighing):
        ctx.save_for_backward(q, k, v, sinks)
        ctx.how = how
        length = q.shape[1]
        seen = _is_visible(length, k.shape[1], window=how.window, device=q.device)
        out = exact.attend(
            q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4),
            exact.DenseKeys(k.transpose(1, 2), v.transpose(1, 2)),
            seen=exact.Seen(seen),
            scale=how.scale_of(q),
            softcap=how.softcap,
            sinks=sinks,
        )
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx, grad: Tensor):
        kept = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        q, k, v, sinks = kept
        with torch.enable_grad():
            out = _attend(q, k, v, replace(ctx.how, sinks=sinks))
        wanted = [x for x in kept if x is not None]
        found = torch.autograd.grad(out, wanted, grad)
        return *found, *[None] * (5 - len(found))


def check_supported(
    module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, object]
) -> None:
    """Refuse options that packed attention would ignore.

    Args:
        options: keyword arguments of the model to attention.
    Raises: Refusal.
    """
    dropout = options.get("dropout")
    chooses = [n for n in CHOOSING if options.get(n) is not None]
    has_both = options.get("s_aux") is not None and options.get("softcap") is not None
    is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
    for is_present, what in (
        (attention_mask is not None, "an attention mask"),
        (dropout, f"attention dropout {dropout}"),
        (has_both, "attention sinks beside a softcap"),
        (chooses, " and ".join(chooses)),
        (not is_causal, "bidirectional attention"),
    ):
        if is_present:
            raise Refusal(
                f"model: {type(module).__name__} asks for {what}, which packed attention does "
                "not do; this model cannot be trained here"
            )


PADDING = ("padded", "exact")
"""Kernels that need the padded layout of a Packing."""
KERNELS = {
    name: partial(_kernel, attend=attend)
    for name, attend in (
        ("padded", partial(_padded, attend=_attend)),
        ("varlen", _varlen),
        ("flash", _flash),
        ("exact", partial(_padded, attend=_attend_exactly)),
    )
}


def register_attention() -> None:
    """Make the kernels known to transformers as spmdrl_padded, spmdrl_varlen, spmdrl_flash,
    spmdrl_exact.

    They have no mask function, so that transformers builds no mask, nor does it search
    `position_ids` for the borders of sequences.
    """
    from transformers import AttentionInterface

    for name, function in KERNELS.items():
        AttentionInterface.register(f"spmdrl_{name}", function)
