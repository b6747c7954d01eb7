"""The cache of running sequences, and attention over it, for transformers' models.

Shape letters: T packed tokens, P of them of prompts, B sequences that continue by one token each,
N slots, L tokens of the longest sequence, Hq query heads, Hkv key/value heads, D head dim.

The model is called with one row [1, T]: the prompts' tokens, then one token of each sequence. A
`Work` is passed down as a keyword argument, like the trainer's `Packing`, and says where keys and
values are cached. Slot i of the cache belongs to the i-th sequence. So the B that continue have the
first B slots, and attention reads these without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.attention.kernels import KERNELS, Weighing, capped
from spmdrl.model.attention.mask_patterns import MaskPattern, mask_pattern_of, visible
from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.sinks import with_sink_scores
from spmdrl.model.exact import attention as exact


class KVCache:
    """Keys and values of `num_slots` sequences of up to `length` tokens, by layer, and the states
    of layers that keep one.

    A layer's storage is allocated at its first write.
    """

    def __init__(self, num_slots: int, length: int):
        self.num_slots = num_slots
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # each [N, Hkv, length, D]
        self.states: dict[str, Tensor] = {}  # each [N, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that have storage."""
        parts = [part for layer in self.layers.values() for part in layer]
        return self.state_bytes + sum(part.nbytes for part in parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.states.values())

    def resized(self, num_slots: int, length: int | None = None) -> KVCache:
        """Return an empty cache of another size, with storage for the same layers.

        Args:
            length: tokens of a slot; None for as many as now.
        """
        other = KVCache(num_slots, self.length if length is None else length)
        for index, (keys, values) in self.layers.items():
            other.allocate(index, keys, values)
        for name, state in self.states.items():
            other.states[name] = state.new_zeros(num_slots, *state.shape[1:])
        return other

    def allocate(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Allocate a layer's storage for such keys and values, [any, Hkv, .., D]."""
        # Zeros, because masked elements get a weight of 0 and must be finite.
        self.layers[index] = (
            keys.new_zeros(self.num_slots, keys.shape[1], self.length, keys.shape[-1]),
            values.new_zeros(self.num_slots, values.shape[1], self.length, values.shape[-1]),
        )

    def write(
        self, index: int, key: Tensor, value: Tensor, *, slots: Tensor, positions: Tensor
    ) -> None:
        """Write a layer's keys and values of W tokens.

        Args:
            index: of the layer.
            key, value: [W, Hkv, D].
            slots, positions: [W] int64, of each token.
        """
        if index not in self.layers:
            self.allocate(index, key, value)
        keys, values = self.layers[index]
        keys[slots, :, positions] = key
        values[slots, :, positions] = value

    def write_states(self, name: str, states: Tensor, *, first: int) -> None:
        """Write a state [M, ...] of the M slots from `first` on."""
        if name not in self.states:
            self.states[name] = states.new_zeros(self.num_slots, *states.shape[1:])
        self.states[name][first : first + len(states)] = states

    def move(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        """Copy the first `length` tokens, and the states, of some slots to other slots."""
        for state in self.states.values():
            state[targets] = state[sources]
        for layer in self.layers.values():
            for cached in layer:
                cached[targets, :, :length] = cached[sources, :, :length]


_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class Work:
    """What one forward pass does with its T packed tokens."""

    cache: KVCache | None
    """None caches nothing; then there are only prompts."""
    kernel: str
    """Name of the trainer's packed attention, for the prompts."""
    packing: Packing | None = None
    """Of the P prompt tokens; None for no prompts."""
    num_prompt_tokens: int = 0
    """P."""
    cached: Tensor = _NONE
    """[W] int64, packed positions of the tokens to cache; one may go to several slots."""
    slots: Tensor = _NONE
    """[W] int64, their slots."""
    positions: Tensor = _NONE
    """[W] int64, their positions in their sequences."""
    prompts: Tensor = _NONE
    """[M] int64, for each new sequence, in the order of their slots, which prompt it has."""
    lengths: Tensor = _NONE
    """[B] int64, tokens of each sequence that continues, the new one included."""
    longest: int = 0
    """L, the longest of these; 0 when none continues."""
    _written: set[int] = field(default_factory=set)
    _is_visible: dict[MaskPattern, Tensor] = field(default_factory=dict)
    _seen: dict[MaskPattern, exact.Seen] = field(default_factory=dict)

    def note(self, index: int) -> None:
        """Note that a layer's keys and values are cached.

        Raises: Refusal the second time: the cache would keep the last ones alone.
        """
        if index in self._written:
            raise Refusal(
                f"engine.kind: transformers, and layer {index} of the model attends more than once "
                "in a forward pass, while the cache keeps one set of its keys and values; take a "
                "model of another family"
            )
        self._written.add(index)

    def is_visible(self, span: MaskPattern) -> Tensor:
        """Return [B, 1, 1, L] bool: what the new tokens see. Layers of one span share it."""
        if span not in self._is_visible:
            at = torch.arange(self.longest, device=self.lengths.device)
            self._is_visible[span] = visible(self.lengths - 1, at, span)[:, None, None]
        return self._is_visible[span]

    def seen(self, span: MaskPattern) -> exact.Seen:
        """Return what the new tokens see, for exact attention. Layers of one span share it."""
        if span not in self._seen:
            self._seen[span] = exact.Seen(self.is_visible(span)[:, 0])
        return self._seen[span]


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
    """Attend within each prompt, and from each new token to its sequence; write the cache.

    Args:
        query: [1, Hq, T, D].
        key, value: [1, Hkv, T, D].
        options: of the kernel, which refuses those that it does not support.
    Returns: [1, T, Hq, D] and None (no attention weights).
    """
    if work.cache is not None:
        work.note(module.layer_idx)
        work.cache.write(
            module.layer_idx,
            key[0].transpose(0, 1)[work.cached],
            value[0].transpose(0, 1)[work.cached],
            slots=work.slots,
            positions=work.positions,
        )
    outputs = []
    num = work.num_prompt_tokens
    if work.packing is not None:
        output, _ = KERNELS[work.kernel](
            module,
            query[:, :, :num],
            key[:, :, :num],
            value[:, :, :num],
            attention_mask,
            packing=work.packing,
            scaling=scaling,
            softcap=softcap,
            s_aux=s_aux,
            **options,
        )
        outputs.append(output)
    if work.longest:
        span = mask_pattern_of(module)
        how = Weighing(scaling, span.window, softcap, s_aux)
        assert work.cache is not None, "sequences that continue have their keys there"
        keys, values = work.cache.layers[module.layer_idx]
        if (temperature := getattr(module, "temperature", None)) is not None:
            query = temperature.applied(query[:, :, num:], work.lengths - 1)
            num = 0
        own = query[0, :, num:].transpose(0, 1)
        if work.kernel == "exact":
            found = _attend_exactly(own, keys, values, work.seen(span), how)
        else:
            found = _attend_one(own, keys, values, work.is_visible(span), how)
        outputs.append(found[None])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, how: Weighing) -> Tensor:
    """Attend from one token of each sequence, [B, Hq, D], to what it sees of its slot, [B, 1, 1, L]
    bool; returns [B, Hq, D]."""
    count = len(query)
    scale = how.scale_of(query)
    longest = seen.shape[-1]
    keys = keys[:count, :, :longest]
    values = values[:count, :, :longest]
    # Query heads that share a key/value head see the same tokens: they are rows of it.
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


def _attend_exactly(
    query: Tensor, keys: Tensor, values: Tensor, seen: exact.Seen, how: Weighing
) -> Tensor:
    """Attend as `_attend_one` does, with the bits that the trainer's rows have."""
    count = len(query)
    found = exact.attend(
        query.unflatten(1, (keys.shape[1], -1)).unsqueeze(3),
        exact.DenseKeys(keys[:count], values[:count]),
        seen=seen,
        scale=how.scale_of(query),
        softcap=how.softcap,
        sinks=how.sinks,
    )
    return found.squeeze(3).flatten(1, 2)


def register_attention() -> None:
    """Register it with transformers as spmdrl_cached, without a mask function, like the trainer's
    kernels."""
    from transformers import AttentionInterface

    AttentionInterface.register("spmdrl_cached", cached_attention)
