"""Ring attention: keys and values are passed from rank to rank while each attends to its own part.

In each of R rounds a rank's queries attend to the keys of one slice. The result is merged with the
earlier ones by the log of the softmax's sum, while these keys are sent to the next rank. In the
backward pass keys and values are passed around again, followed by their gradients, which are back
at their rank after R rounds. A rank holds at most two slices of keys and values at a time, for any
number of heads.

A tile is a part of a slice's queries and keys. Either all keys are visible to all queries: both are
of one sequence, or the keys are of a prefix that the queries' sequences share, and the keys come
first. Or queries and keys are the same tokens of several sequences, under a causal mask. With
zigzag slices all ranks have equal work in each round.

Source: arXiv 2310.01889, section 3; merging: 2205.14135, section 3.1.

Shape letters: t tokens of a slice, n queries and m keys of a tile, S its sequences, R ranks; Hq
query and Hkv key heads, G = Hq / Hkv; D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.data.prefix_tree import Path
from spmdrl.model.attention.kernels import widened
from spmdrl.model.attention.sinks import sink_gradient
from spmdrl.world.torch_internals import FLASH_BACKWARD, FLASH_FORWARD

Spans = tuple[tuple[int, int], tuple[int, int]]
"""[begin, end) in a row of the two chunks of a slice."""


@dataclass(frozen=True)
class Tile:
    """Rows of the own slice's queries, and of a slice's keys that they attend to."""

    queries: slice
    keys: slice
    is_causal: bool
    """Queries and keys are the same tokens, under a causal mask; else all keys are visible."""
    cu_seqlens: tuple[Tensor, Tensor]  # [S+1] int32 each, of the queries and of the keys
    longest: tuple[int, int]  # tokens of the longest sequence, likewise

    def is_visible(self) -> Tensor | None:
        """Return [n, m] bool, which keys are visible to a query; None if all are."""
        if not self.is_causal:
            return None
        ends = self.cu_seqlens[0]
        count = self.queries.stop - self.queries.start
        sequences = torch.arange(len(ends) - 1, device=ends.device)
        of_token = sequences.repeat_interleave(ends.diff(), output_size=count)
        return (of_token[:, None] == of_token).tril()


Rounds = tuple[tuple[Tile, ...], ...]


def plan_rounds(
    paths: Sequence[Path],
    spans_of: Callable[[int], Spans],
    *,
    rank: int,
    size: int,
    device: torch.device | str,
) -> Rounds:
    """Return the tiles of each round. In round i, keys are those of rank (rank - i) % size.

    Args:
        paths: what each part of a row attends to, its own tokens last; see PrefixTree.paths.
        spans_of: returns the chunks of a rank's slice.
        device: of the index tensors.
    """
    reach = {path[-1]: path[-1][1] for path in paths}
    for path in paths:
        for span in path:
            reach[span] = max(reach[span], path[-1][1])
    rounds = []
    for turn in range(size):
        theirs = spans_of((rank - turn) % size)
        rounds.append(
            tuple(
                tile
                for i, own in enumerate(spans_of(rank))
                for j, keys in enumerate(theirs)
                for tile in _tiles(own, keys, at=(i, j), reach=reach, device=device)
            )
        )
    return tuple(rounds)


def _tiles(
    own: tuple[int, int],
    keys: tuple[int, int],
    *,
    at: tuple[int, int],
    reach: Mapping[tuple[int, int], int],
    device: torch.device | str,
) -> Iterator[Tile]:
    """Yield the tiles of two chunks, number at[0] and at[1] of their slices.

    Args:
        reach: {span of a part of the row: where the tokens end that attend to it}. They follow it.
    """
    if keys[0] > own[0]:
        return
    inside = [
        (max(begin, keys[0]), min(end, keys[1]), until)
        for (begin, end), until in reach.items()
        if begin < keys[1] and end > keys[0]
    ]
    if own == keys:
        bounds = [keys[0], *(end for _, end, _ in inside)]
        chunk = slice(at[0] * (own[1] - own[0]), (at[0] + 1) * (own[1] - own[0]))
        longest = max(b - a for a, b in zip(bounds, bounds[1:]))
        of_both = torch.tensor(bounds, dtype=torch.int32).to(device) - keys[0]
        yield Tile(chunk, chunk, True, (of_both, of_both), (longest, longest))
    for begin, end, until in inside:
        # Own keys of the same chunk are in the tile above.
        first = end if own == keys else own[0]
        last = min(until, own[1])
        if last > first:
            of_queries, of_keys = (
                torch.tensor([0, count], dtype=torch.int32).to(device)
                for count in (last - first, end - begin)
            )
            yield Tile(
                _within(own, at[0], first, last),
                _within(keys, at[1], begin, end),
                False,
                (of_queries, of_keys),
                (last - first, end - begin),
            )


def _within(chunk: tuple[int, int], number: int, begin: int, end: int) -> slice:
    """Return where tokens [begin, end) of a row are in a slice whose chunk they lie in."""
    offset = number * (chunk[1] - chunk[0]) - chunk[0]
    return slice(begin + offset, end + offset)


# --------------------------------------------------------------------------- one tile


def dense_forward(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend within a tile by matrix products in float32; any device.

    Args:
        q: [n, Hq, D]. k: [m, Hkv, D]. v: [m, Hkv, Dv].
    Returns: [n, Hq, Dv] float32, and the logs of the sums of the softmax, [n, Hq] float32.
    """
    scores = _scores(q, k, tile, scale=scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("hgnm,mhd->nhgd", (scores - lse[..., None]).exp(), v.float())
    return out.flatten(1, 2), lse.flatten(0, 1).transpose(0, 1)


def dense_backward(
    of_queries: Sequence[Tensor], k: Tensor, v: Tensor, tile: Tile, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float32 gradients of q, k and v, for a tile of a larger softmax.

    Args:
        of_queries: the gradient [n, Hq, Dv], q, and out [n, Hq, Dv] and lse [n, Hq] of all tiles.
    Source: arXiv 2205.14135, appendix B.2.
    """
    grad, q, out, lse = of_queries
    heads = (k.shape[1], -1)
    lse, delta = (
        x.transpose(0, 1).unflatten(0, heads)[..., None]
        for x in (lse, (grad.float() * out.float()).sum(-1))
    )
    weights = (_scores(q, k, tile, scale=scale) - lse).exp()  # [Hkv, G, n, m]
    grad = grad.float().unflatten(1, heads)
    of_scores = weights * (torch.einsum("nhgd,mhd->hgnm", grad, v.float()) - delta) * scale
    of_q = torch.einsum("hgnm,mhd->nhgd", of_scores, k.float()).flatten(1, 2)
    of_k = torch.einsum("hgnm,nhgd->mhd", of_scores, q.float().unflatten(1, heads))
    return of_q, of_k, torch.einsum("hgnm,nhgd->mhd", weights, grad)


def _scores(q: Tensor, k: Tensor, tile: Tile, *, scale: float) -> Tensor:
    """Return scores [Hkv, G, n, m] float32, -inf where a key is not visible."""
    own = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nhgd,mhd->hgnm", own, k.float()) * scale
    seen = tile.is_visible()
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Do what `dense_forward` does, by torch's flash attention (CUDA, bfloat16)."""
    out, lse, *_ = FLASH_FORWARD(
        q,
        k,
        widened(v, k).contiguous(),
        *tile.cu_seqlens,
        *tile.longest,
        0.0,
        tile.is_causal,
        False,
        scale=scale,
    )
    return out[..., : v.shape[-1]].float(), lse.transpose(0, 1)


def flash_backward(
    of_queries: Sequence[Tensor], k: Tensor, v: Tensor, tile: Tile, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `dense_backward` does, by torch's flash attention (CUDA, bfloat16)."""
    grad, q, out, lse = of_queries
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = FLASH_BACKWARD(
        widened(grad, q).contiguous(),
        q,
        k,
        widened(v, k).contiguous(),
        widened(out, q).contiguous(),
        lse.transpose(0, 1).contiguous(),
        *tile.cu_seqlens,
        *tile.longest,
        0.0,
        tile.is_causal,
        no_dropout,
        torch.empty(0, device=q.device),
        scale=scale,
    )
    of_q, of_k, of_v = (x.float() for x in found)
    return of_q, of_k, of_v[..., : v.shape[-1]]


DENSE = (dense_forward, dense_backward)
FLASH = (flash_forward, flash_backward)


# --------------------------------------------------------------------------- the ring


class _Arriving:
    """Sends a tensor to the next rank and receives the previous rank's."""

    def __init__(self, leaving: Tensor, group: dist.ProcessGroup):
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        self._leaving = leaving.contiguous()  # kept until it has left
        self._tensor = torch.empty_like(self._leaving)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._leaving, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._tensor, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """Return the received tensor."""
        for work in self._works:
            work.wait()
        return self._tensor


class Ring(torch.autograd.Function):
    """Attention of own queries over all ranks' keys; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rounds: Rounds,
        group: dist.ProcessGroup,
        kernel: tuple[Callable, Callable],
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return [t, Hq, Dv] from q [t, Hq, D], k [t, Hkv, D], v [t, Hkv, Dv] and sinks [Hq]."""
        out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=torch.float32)
        lse = out.new_full(q.shape[:2], float("-inf"))
        # A sink is one more key of each query, whose value is zero: it is in the sum only.
        if sinks is not None:
            lse.copy_(sinks)
        here = torch.cat([k, v], dim=-1)
        for turn, tiles in enumerate(rounds):
            # Started before the tiles are computed, so that the transfer overlaps with them.
            next_ones = _Arriving(here, group) if turn + 1 < len(rounds) else None
            keys, values = here.split([k.shape[-1], v.shape[-1]], dim=-1)
            for tile in tiles:
                part = kernel[0](
                    q[tile.queries], keys[tile.keys], values[tile.keys], tile, scale=scale
                )
                _merge(out[tile.queries], lse[tile.queries], *part)
            here = next_ones.wait() if next_ones else here
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rounds = rounds
        ctx.group = group
        ctx.kernel = kernel
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and sinks."""
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grad = grad.contiguous()
        of_q = torch.zeros_like(q, dtype=torch.float32)
        here = torch.cat([k, v], dim=-1)
        following = None
        for turn, tiles in enumerate(ctx.rounds):
            next_ones = _Arriving(here, ctx.group) if turn + 1 < len(ctx.rounds) else None
            keys, values = here.split([k.shape[-1], v.shape[-1]], dim=-1)
            of_here = torch.zeros_like(here, dtype=torch.float32)
            for tile in tiles:
                own = [x[tile.queries] for x in (grad, q, out, lse)]
                parts = ctx.kernel[1](
                    own, keys[tile.keys], values[tile.keys], tile, scale=ctx.scale
                )
                of_q[tile.queries] += parts[0]
                of_here[tile.keys] += torch.cat(parts[1:], dim=-1)
            if following:  # gradients of these keys from other ranks
                of_here += following.wait()
            following = _Arriving(of_here, ctx.group)
            here = next_ones.wait() if next_ones else here
        assert following is not None, "a row has at least one round"
        # After the last of R transfers the gradients are at the rank that has the keys.
        of_k, of_v = following.wait().split([k.shape[-1], v.shape[-1]], dim=-1)
        of_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
        parts = (of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype))
        return *parts, None, None, None, None, of_sinks


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a tile's result into [n, Hq, Dv] and [n, Hq], in place.

    The first round includes each query's own token, so that no sum is empty.
    """
    total = torch.logaddexp(lse, part_lse)
    out *= (lse - total).exp()[..., None]
    out += part * (part_lse - total).exp()[..., None]
    lse.copy_(total)
