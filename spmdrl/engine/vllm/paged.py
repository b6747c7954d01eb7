"""Attention over vLLM's paged cache, with the bits of the trainer's exact attention.

A pass computes a row of T packed tokens: for each sequence its newest ones. Their keys and values
are written into pages of the cache (vLLM calls them blocks). Then each sequence attends to its keys
from the first token on. A page of KEYS tokens, as vLLM has on CPUs, is a block of attention: it is
read where it is. Keys in pages of another size are gathered.

Shape letters: T packed tokens, B sequences of a batch, L tokens that one of them computes at most,
G query heads of a key/value head, Hkv key/value heads, D head dim, Dv head dim of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.attention.kernels import check_supported
from spmdrl.model.attention.mask_patterns import MaskPattern, mask_pattern_of, visible
from spmdrl.model.exact.attention import DenseKeys, Keys, Seen, attend
from spmdrl.model.exact.units import ALIGNED, KEYS, padded


class PagedLayer:
    """The keys and values of one attention layer.

    Args:
        name: of the layer, in vLLM's metadata of a pass.
        key: [1, Hkv, any, D], like those that it will have.
        value: [1, Hkv, any, Dv].
    """

    def __init__(self, name: str, key: Tensor, value: Tensor):
        self.name = name
        self.num_kv_heads = key.shape[1]
        self.head_dim = key.shape[-1]
        self.value_dim = value.shape[-1]
        self.dtype = key.dtype

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Use vLLM's storage.

        Args:
            kv_cache: [pages, Hkv, tokens of a page, D + Dv]. Only its size matters: a page here
                has the keys of all heads before their values.
        """
        self.kv_cache = kv_cache
        num_blocks, heads, self.block_size, _ = kv_cache.shape
        tokens = heads * self.block_size
        keys, values = kv_cache.view(num_blocks, -1).split(
            [tokens * self.head_dim, tokens * self.value_dim], dim=1
        )
        self.keys = keys.view(num_blocks, heads, self.block_size, self.head_dim)
        """[pages, Hkv, tokens of a page, D]."""
        self.values = values.view(num_blocks, heads, self.block_size, self.value_dim)
        """[pages, Hkv, tokens of a page, Dv]."""

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write keys [1, Hkv, T, D] and values [1, Hkv, T, Dv] to slots, the first of T."""
        blocks = slots // self.block_size
        places = slots % self.block_size
        self.keys[blocks, :, places] = key[0, :, : len(slots)].transpose(0, 1)
        self.values[blocks, :, places] = value[0, :, : len(slots)].transpose(0, 1)

    def gather(self, tables: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the first `count` keys [B, Hkv, count, D] and values [B, Hkv, count, Dv] of
        sequences whose blocks are tables [B, n]."""
        keys, values = (
            stored[:, :, :count][tables].transpose(1, 2).flatten(2, 3)[:, :, :count]
            for stored in (self.keys, self.values)
        )
        return keys, values


class PagedStep:
    """Which tokens of which sequences a pass computes.

    Args:
        metadata: {name of a layer: vLLM's CommonAttentionMetadata}. Layers whose caches have the
            same blocks share it.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self._known: dict[int, list[_Batch]] = {}

    def slots(self, layer: PagedLayer) -> Tensor:
        """Return the slot of each token in a layer's cache, [T without padding]."""
        metadata = self._metadata[layer.name]
        return metadata.slot_mapping[: metadata.num_actual_tokens]

    def batches(self, layer: PagedLayer) -> list[_Batch]:
        """Return the sequences of a pass, in batches of similar ones."""
        metadata = self._metadata[layer.name]
        key = id(metadata)
        if key not in self._known:
            self._known[key] = list(_batches(metadata, layer.block_size))
        return self._known[key]


class PagedKeys:
    """Keys and values of B sequences in pages of KEYS tokens; see `Keys`.

    Args:
        layer: whose pages they are.
        pages: for each block of attention, the sequences that reach it and their pages.
        count: B.
    """

    def __init__(self, layer: PagedLayer, pages: list[list[tuple[int, int]]], count: int):
        self.heads = layer.num_kv_heads
        self.dims = (layer.head_dim, layer.value_dim)
        self._layer = layer
        self._pages = pages
        self._count = count

    def scores(self, rows: Tensor, begin: int, end: int) -> Tensor:
        """See Keys. Scores of sequences that do not reach the block are of no meaning."""
        width = padded(end - begin, ALIGNED)
        own = rows.unflatten(0, (self._count, self.heads))
        out = rows.new_empty(*own.shape[:3], width)
        for sequence, page in self._pages[begin // KEYS]:
            keys = self._layer.keys[page, :, :width].transpose(1, 2)
            torch.bmm(own[sequence], keys, out=out[sequence])
        return out.flatten(0, 1)

    def weighed(self, weights: Tensor, begin: int, end: int) -> Tensor:
        """See Keys. Zeros for sequences that do not reach the block."""
        own = weights.unflatten(0, (self._count, self.heads))
        out = weights.new_zeros(*own.shape[:3], self.dims[1])
        for sequence, page in self._pages[begin // KEYS]:
            values = self._layer.values[page, :, : own.shape[-1]]
            torch.bmm(own[sequence], values, out=out[sequence])
        return out.flatten(0, 1)


class _Batch:
    """Sequences that compute about as many tokens.

    Args:
        firsts: [B], where the tokens of each are in the packed row.
        counts: [B], how many it computes.
        lengths: [B], tokens of each sequence, those that are computed now included.
        tables: [B, n], the pages of their tokens.
        num_keys: how many of the pages' keys to take.
    """

    def __init__(
        self, firsts: Tensor, counts: Tensor, lengths: Tensor, tables: Tensor, *, num_keys: int
    ):
        self._tables = tables
        self._num_keys = num_keys
        at = torch.arange(int(counts.max()))
        self.is_own = at < counts[:, None]
        """[B, L], which of L tokens a sequence has."""
        at = torch.where(self.is_own, at, 0)
        self.rows = firsts[:, None] + at
        """[B, L], where they are in the packed row; of the first where there is none."""
        self.positions = (lengths - counts)[:, None] + at
        """[B, L], where they are in their sequences; of the first where there is none."""
        self._pages: list[list[tuple[int, int]]] = [[] for _ in range(0, num_keys, KEYS)]
        for sequence, (table, length) in enumerate(zip(tables.tolist(), lengths.tolist())):
            for block in range(min(len(table), -(-length // KEYS))):
                self._pages[block].append((sequence, table[block]))
        self._seen: dict[MaskPattern, Seen] = {}

    def seen(self, pattern: MaskPattern) -> Seen:
        """Return what its tokens see. Layers of one pattern share it."""
        if pattern not in self._seen:
            keys = torch.arange(self._num_keys)
            seen = visible(self.positions.flatten(), keys, pattern)
            self._seen[pattern] = Seen(seen.view(*self.positions.shape, -1))
        return self._seen[pattern]

    def keys(self, layer: PagedLayer) -> Keys:
        """Return the keys and values of a layer."""
        if layer.block_size == KEYS:
            return PagedKeys(layer, self._pages, len(self._tables))
        return DenseKeys(*layer.gather(self._tables, self._num_keys))


def _batches(metadata: Any, block_size: int) -> Iterator[_Batch]:
    count = metadata.num_reqs
    firsts = metadata.query_start_loc_cpu[: count + 1].long()
    counts = firsts.diff()
    lengths = metadata.seq_lens[:count].long()
    alike: dict[int, list[int]] = {}
    for index, new in enumerate(counts.tolist()):
        if new:
            alike.setdefault(_size(new), []).append(index)
    for own in alike.values():
        longest = int(lengths[own].max())
        num_blocks = -(-longest // block_size)
        yield _Batch(
            firsts[own],
            counts[own],
            lengths[own],
            metadata.block_table_tensor[own, :num_blocks].long(),
            # So many need no padding.
            num_keys=min(padded(longest, ALIGNED), num_blocks * block_size),
        )


def _size(count: int) -> int:
    """Return about the logarithm of a number of tokens: those of one size are padded to the most,
    which at most doubles what is computed."""
    return (-(-count // ALIGNED)).bit_length() if count > 1 else 0


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    work: PagedStep,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write keys and values into the cache, and attend from each token to its sequence.

    Args:
        module: has a `paged_layer`.
        query: [1, Hkv * G, T, D]. key: [1, Hkv, T, D]. value: [1, Hkv, T, Dv].
    Returns: [1, T, Hkv * G, Dv], zeros for padding, and None (no attention weights).
    """
    check_supported(module, attention_mask, {"softcap": softcap, "s_aux": s_aux, **options})
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    layer.write(key, value, work.slots(layer))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    temperature = getattr(module, "temperature", None)
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for batch in work.batches(layer):
        own = query[0, :, batch.rows.flatten()]
        if temperature is not None:
            own = temperature.applied(own[None], batch.positions.flatten())[0]
        # [Hkv, G, B, L, D]
        own = own.unflatten(1, batch.rows.shape).unflatten(0, (key.shape[1], -1))
        found = attend(
            own.permute(2, 0, 1, 3, 4),
            batch.keys(layer),
            seen=batch.seen(mask_pattern_of(module)),
            scale=scale,
            softcap=softcap,
            sinks=s_aux,
        )
        # [B, L, Hkv * G, Dv]
        found = found.permute(0, 3, 1, 2, 4).flatten(2, 3)
        out[batch.rows[batch.is_own]] = found[batch.is_own]
    return out[None], None
