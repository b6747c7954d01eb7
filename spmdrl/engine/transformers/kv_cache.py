"""Keys and values of the sequences under way, and attention over them, for transformers' models.

Shape letters: T packed tokens, P of them of prompts, B sequences that go on by one token each,
N slots, L tokens of the longest sequence, Hq query heads, Hkv key/value heads, D head dim.

The model is called as one row [1, T]: the prompts' tokens, then one token of each sequence. A
`Work` travels down as a keyword argument, as the trainer's `Packing` does, and says where keys
and values are kept. Slot i of the cache is that of the i-th sequence, so the B that go on are the
first B slots, and attention reads them where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.model.attention.kernels import KERNELS, Weighing, capped
from spmdrl.model.attention.mask_patterns import Span, mask_pattern_of, visible
from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.sinks import with_sink_scores


class KVCache:
    """Keys and values of `num_slots` sequences of up to `length` tokens, by layer.

    Layers get their storage when they are first written to.
    """

    def __init__(self, num_slots: int, length: int):
        self.num_slots = num_slots
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # each [N, Hkv, length, D]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that were written to."""
        return sum(part.nbytes for layer in self.layers.values() for part in layer)

    def resized(self, num_slots: int, length: int) -> KVCache:
        """Return an empty cache of other sizes, with storage for the layers that this one has."""
        other = KVCache(num_slots, length)
        other.layers = {
            index: tuple(
                part.new_zeros(num_slots, part.shape[1], length, part.shape[3]) for part in layer
            )
            for index, layer in self.layers.items()
        }
        return other

    def write(
        self, index: int, key: Tensor, value: Tensor, *, slots: Tensor, positions: Tensor
    ) -> None:
        """Keep a layer's keys and values of W tokens.

        Args:
            index: of the layer.
            key, value: [W, Hkv, D].
            slots, positions: [W] int64, of each token.
        """
        if index not in self.layers:
            # Zeros, since what is masked must be finite: its weight is 0.
            self.layers[index] = tuple(
                part.new_zeros(self.num_slots, part.shape[1], self.length, part.shape[2])
                for part in (key, value)
            )
        for kept, part in zip(self.layers[index], (key, value)):
            kept[slots, :, positions] = part

    def move(self, of: Sequence[int], to: Sequence[int], *, length: int) -> None:
        """Copy the first `length` tokens of slots `of` to slots `to`."""
        for layer in self.layers.values():
            for kept in layer:
                kept[to, :, :length] = kept[of, :, :length]


_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class Work:
    """What one forward pass does with its T packed tokens."""

    cache: KVCache | None
    """None keeps nothing; then there are prompts only."""
    kernel: str
    """Name of the trainer's packed attention, for the prompts."""
    packing: Packing | None = None
    """Of the P prompt tokens; None without any."""
    num_prompt_tokens: int = 0
    """P."""
    kept: Tensor = _NONE
    """[W] int64, packed positions of the tokens to keep; one may go to several slots."""
    slots: Tensor = _NONE
    """[W] int64."""
    positions: Tensor = _NONE
    """[W] int64."""
    lengths: Tensor = _NONE
    """[B] int64, tokens of each sequence that goes on, the new one included."""
    longest: int = 0
    """L, of these; 0 when none goes on."""
    _is_visible: dict[Span, Tensor] = field(default_factory=dict)

    def is_visible(self, span: Span) -> Tensor:
        """Return [B, 1, 1, L] bool: what the new tokens see, the same in layers of one span."""
        if span not in self._is_visible:
            at = torch.arange(self.longest, device=self.lengths.device)
            self._is_visible[span] = visible(self.lengths - 1, at, span)[:, None, None]
        return self._is_visible[span]


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    work: Work,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each prompt, and from each new token to its sequence; keep keys and values.

    Args:
        query: [1, Hq, T, D]; key, value: [1, Hkv, T, D].
        options: of the kernel, which refuses what it cannot do.
    Returns: [1, T, Hq, D] and None (no attention weights).
    """
    if work.cache is not None:
        new_keys, new_values = (part[0].transpose(0, 1)[work.kept] for part in (key, value))
        work.cache.write(
            module.layer_idx, new_keys, new_values, slots=work.slots, positions=work.positions
        )
    outputs = []
    num = work.num_prompt_tokens
    if work.packing is not None:
        q, k, v = (part[:, :, :num] for part in (query, key, value))
        options |= dict(scaling=scaling, softcap=softcap, s_aux=s_aux)
        kernel = KERNELS[work.kernel]
        outputs.append(kernel(module, q, k, v, attention_mask, packing=work.packing, **options)[0])
    if work.longest:
        span = mask_pattern_of(module)
        how = Weighing(scaling, span.window, softcap, s_aux)
        assert work.cache is not None, "what goes on has its keys there"
        keys, values = work.cache.layers[module.layer_idx]
        if (temperature := getattr(module, "temperature", None)) is not None:
            query = temperature.applied(query[:, :, num:], work.lengths - 1)
            num = 0
        own = query[0, :, num:].transpose(0, 1)
        seen = work.is_visible(span)
        outputs.append(_attend_one(own, keys, values, seen, how)[None])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, how: Weighing) -> Tensor:
    """Attend from one token of each sequence, [B, Hq, D], to what it sees of its slot, [B, 1, 1, L]
    bool; returns [B, Hq, D]."""
    count = len(query)
    scale = how.scale_of(query)
    keys, values = (kept[:count, :, : seen.shape[-1]] for kept in (keys, values))
    # Query heads that read one key/value head see the same: they are its rows.
    query = query.unflatten(1, (keys.shape[1], -1))
    if how.softcap is None and how.sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=scale
        ).flatten(1, 2)
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale
    if how.softcap is None:
        scores = scores.masked_fill(~seen, float("-inf"))
    else:
        scores = capped(scores, how.softcap, seen)
    if how.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        rows = scores.flatten(0, 1)  # [B * Hkv, Hq / Hkv, L]
        weights = with_sink_scores(rows, how.sinks, kv_heads=keys.shape[1]).view_as(scores)
    return torch.matmul(weights.to(values.dtype), values).flatten(1, 2)


def register_attention() -> None:
    """Make it known to transformers as spmdrl_cached, without a mask function, as the trainer's
    kernels are."""
    from transformers import AttentionInterface

    AttentionInterface.register("spmdrl_cached", cached_attention)
