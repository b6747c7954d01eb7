"""Digests: one exact 64-bit number for a tensor, which does not depend on how it is sharded.

The bits of an element are a signed or unsigned number x of at most 32 bits (for 64 bits see below).
Its index determines an odd 64-bit weight w. The digest is the sum of x * w modulo 2**64. Sums
modulo 2**64 are exact in any order, so the digests of shards add up to that of the whole tensor.

*Every change of one bit changes the digest.* Bit k < 32 of an element changes x by 2**k or -2**k,
and the digest by 2**k * w. Because w is odd, this is not 0 modulo 2**64. Several changes leave the
digest the same only by chance: their terms, each with a pseudorandom weight, must add up to 0. The
probability is at most 2**-26 if only highest bits change, and at most 2**-50 if a low bit of any
element changes. So digests detect accidents. They do not detect an attack: a person who chooses the
elements can make two tensors with the same digest.

*It takes one pass over memory.* The elements of a tensor, row-major, are read as 64-bit words X of
8 / itemsize elements, with 64 words in a block; elements that this rank does not hold are zeros.
The upper half of a word is added to the word: Y = X + (X >> 32). So an element in the lower half
counts once, and an element in the upper half 2**32 + 1 times, which is odd. An element at slot s of
a half counts 2**(8 * itemsize * s) times, and its highest bit is below 2**32. So one bit changes Y
by an odd number times at most 2**31, and multiplied by the odd weight of the word this is not 0. It
is the same for a float64 or int64, which is a whole word: bit k < 32 changes Y by 2**k, and a
higher bit by 2**(k - 32) * (2**32 + 1). The weight of a word is the product of an odd number for
its index in the block and an odd number for the block. So there is one product per word, and there
are few weights to store. The elements of many tensors are concatenated into pieces that fit into
the cache of the processor, so small tensors are as fast as large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor

from spmdrl.algorithms.splitmix import mix
from spmdrl.model.tensor_parts import Box

_WORDS = 64
"""Words in a block."""
_CHUNK = {"cpu": 2**17, "cuda": 2**21}
"""Words at a time. On a CPU, intermediate results of this size stay in its cache."""
_CACHED_BLOCKS = 2**16
"""With at most this many blocks the weights are computed once, otherwise at each call."""
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@lru_cache(maxsize=128)
def odd_weights(first: int, count: int, *, dim: int, device: torch.device) -> Tensor:
    """Return [count] int64, odd weights for the indices `first`, `first` + 1, ... of a dim.

    Args:
        dim: counted from the last; 0: the index of words in a block.
    """
    # Each dim has 2**48 keys of its own, so the weights of two dims are unrelated.
    at = torch.arange(first, first + count, device=device)
    return mix(at + (dim << 48)).bitwise_or_(1)


def factor_of(number: int) -> int:
    """Return the factor for the number-th tensor of the same name: odd, int64, 1 for number 0."""
    return int(mix(torch.tensor(number))) | 1 if number else 1


@dataclass(frozen=True)
class _Segment:
    """Some elements of a box, in rows; each row is contiguous in the whole tensor."""

    view: int  # index of the box's view
    begin: int  # first element of the view
    end: int  # end of the elements of the view
    rows: int
    leads: Tensor  # [rows], number of elements in a row's first block before the row begins
    blocks: Tensor  # [rows] int64, first block of each row in the whole tensor
    per_row: int  # blocks of a row

    @property
    def count(self) -> int:
        """Number of blocks of all rows."""
        return self.rows * self.per_row

    def weights(self, device: torch.device) -> Tensor:
        """Return [count] int64, an odd weight for each block."""
        across = torch.arange(self.per_row, device=device)
        at = (self.blocks.to(device)[:, None] + across).flatten()
        return mix(at + (1 << 48)).bitwise_or_(1)

    def filled(self, view: Tensor, *, per_block: int, device: torch.device) -> list[Tensor]:
        """Return its elements, padded with zeros to whole blocks, in pieces to concatenate."""
        own = view.reshape(-1)[self.begin : self.end].to(device)
        length = len(own) // self.rows
        width = self.per_row * per_block
        if length == width:
            return [own]
        lead = int(self.leads[0])
        # A single row needs no scatter, which would need an index for each element.
        if self.rows == 1:
            zeros = own.new_zeros(width - length)
            return [zeros[:lead], own, zeros[lead:]]
        # Rows may begin at different elements of their first block.
        filled = own.new_zeros(self.rows, width)
        at = self.leads.to(device)[:, None] + torch.arange(length, device=device)
        return [filled.scatter_(1, at, own.view(self.rows, length)).flatten()]


class Digester:
    """Computes digests of the boxes of tensors that this rank holds. It plans the layout once.

    Args:
        boxes: for every view: the index of its tensor, the box, the whole tensor's shape.
        itemsize: of all elements, bytes.
        device: computes the digests; views on other devices are copied to it in pieces.
    """

    def __init__(
        self,
        boxes: Sequence[tuple[int, Box, Sequence[int]]],
        *,
        itemsize: int,
        device: torch.device,
    ):
        self._per_block = _WORDS * 8 // itemsize
        self._device = device
        self._of = [number for number, *_ in boxes]
        self._chunks: list[list[_Segment]] = []
        room = 0
        most = _CHUNK[device.type] // _WORDS
        for view, (_, box, shape) in enumerate(boxes):
            for segment in _segments(view, box, shape, per_block=self._per_block, most=most):
                if segment.count > room:
                    self._chunks.append([])
                    room = most
                self._chunks[-1].append(segment)
                room -= segment.count
        total = sum(segment.count for chunk in self._chunks for segment in chunk)
        self._known = [self._weights(c) for c in self._chunks] if total <= _CACHED_BLOCKS else []

    def digests(self, views: Sequence[Tensor], *, count: int) -> Tensor:
        """Return [count] int64, the contribution of these views to the digest of each tensor."""
        found = torch.zeros(count, dtype=torch.int64, device=self._device)
        for number, chunk in enumerate(self._chunks):
            weights, tensors = self._known[number] if self._known else self._weights(chunk)
            own: list[Tensor] = []
            for one in chunk:
                view = as_bits(views[one.view])
                own += one.filled(view, per_block=self._per_block, device=self._device)
            found.index_add_(0, tensors, _block_sums(own).mul_(weights))
        return found

    def _weights(self, chunk: Sequence[_Segment]) -> tuple[Tensor, Tensor]:
        """Return the weight of each block of a chunk and the index of its tensor: [n] int64."""
        weights = torch.cat([one.weights(self._device) for one in chunk])
        numbers = torch.tensor([self._of[one.view] for one in chunk])
        counts = torch.tensor([one.count for one in chunk])
        return weights, numbers.repeat_interleave(counts).to(self._device)


def _segments(
    view: int, box: Box, shape: Sequence[int], *, per_block: int, most: int
) -> Iterator[_Segment]:
    """Yield the elements of a box in segments of about `most` blocks at most."""
    if not box.numel:
        return
    starts, length = _rows_of(box, shape)
    leads = starts % per_block
    blocks = starts // per_block
    if len(starts) == 1:  # a row of any length, divided at the ends of blocks
        lead = int(leads)
        first = int(blocks)
        begin = 0
        while begin < length:
            end = min(begin + most * per_block - lead, length)
            count = -(-(lead + end - begin) // per_block)
            own = torch.tensor([lead]), torch.tensor([first])
            yield _Segment(view, begin, end, 1, *own, count)
            first = first + count
            begin = end
            lead = 0
        return
    # Each row gets as many blocks as the row that begins latest in its block. The rest is filled
    # with zeros, which do not change a digest.
    per_row = -(-(int(leads.max()) + length) // per_block)
    size = max(1, most // per_row)
    for row in range(0, len(starts), size):
        some = slice(row, row + size)
        rows = len(starts[some])
        begin = row * length
        end = (row + rows) * length
        yield _Segment(view, begin, end, rows, leads[some], blocks[some], per_row)


def _rows_of(box: Box, shape: Sequence[int]) -> tuple[Tensor, int]:
    """Return the contiguous rows of a box in the whole tensor: [n] int64 starts, and the length."""
    starts = torch.zeros(1, dtype=torch.int64)
    inner = 1
    length = 1
    is_gapless = True
    # Going up from the last dim, elements are contiguous up to and including the first dim that is
    # cut.
    for at, own, size in reversed([*zip(box.start, box.shape, shape)]):
        if is_gapless:
            starts = starts + at * inner
            length = length * own
        else:
            here = (torch.arange(own) + at) * inner
            starts = (here[:, None] + starts).flatten()
        is_gapless = is_gapless and own == size
        inner *= size
    return starts, length


def _block_sums(pieces: Sequence[Tensor]) -> Tensor:
    """Return [n] int64: for each block, the weighted sum of its words."""
    device = pieces[0].device
    size = sum(len(piece) for piece in pieces) * pieces[0].element_size() // 8
    room = _room(size, 0, device)
    torch.cat(pieces, out=room.view(pieces[0].dtype))
    words = room.view(-1, _WORDS)
    weights = odd_weights(0, _WORDS, dim=0, device=device)
    sums = _sums_by_numpy if device.type == "cpu" else _sums_by_torch
    return sums(words, weights, room=_room(size, 1, device).view(-1, _WORDS))


def _sums_by_numpy(words: Tensor, weights: Tensor, *, room: Tensor) -> Tensor:
    """Return [n] int64 for [n, 64] words; numpy multiplies int64 twice as fast as torch."""
    upper = torch.bitwise_right_shift(words, 32, out=room)
    # The sum of w * X and that of w * (X >> 32) add up to that of w * Y.
    sums = (numpy.einsum("ij,j->i", part.numpy(), weights.numpy()) for part in (words, upper))
    return torch.from_numpy(sum(sums))


def _sums_by_torch(words: Tensor, weights: Tensor, *, room: Tensor) -> Tensor:
    """Return the same as `_sums_by_numpy`, on any device."""
    upper = torch.bitwise_right_shift(words, 32, out=room)
    return upper.add_(words).mul_(weights).sum(1)


def _room(size: int, number: int, device: torch.device) -> Tensor:
    """Return [size] int64 memory, the same for each call with this number."""
    # Touching new pages would take longer than the computation.
    known = _rooms(number, device)
    return known[:size] if size <= len(known) else known.new_empty(size)


@lru_cache(maxsize=4)
def _rooms(number: int, device: torch.device) -> Tensor:
    return torch.empty(_CHUNK[device.type], dtype=torch.int64, device=device)


def as_bits(values: Tensor) -> Tensor:
    """Return a view of the same memory as integers."""
    return values.view(_BITS[values.element_size()])


def of_places(values: Tensor, places: Tensor) -> Tensor:
    """Return [] int64, the digest of values [n] of 4 bytes at places [n] int64 below 2**48.

    One product per value, so every change of one bit changes it, as above.
    """
    weights = mix(places + (3 << 48)).bitwise_or_(1)
    return (as_bits(values).long() * weights).sum()


class Sequences:
    """Computes digests of a micro-batch's sequences, from columns of their tokens.

    Args:
        rows: [S] int64, row of each sequence in the whole batch; -1: a dummy, which is left out.
        starts: [S+1] integers, the index of each sequence's first token; the last is their number.
    """

    def __init__(self, rows: Tensor, starts: Tensor):
        lengths = starts.diff().long()
        self._starts = starts.long()
        self._kept = rows >= 0
        self._inside = torch.arange(int(starts[-1]), device=rows.device)
        self._inside -= self._starts[:-1].repeat_interleave(lengths)
        self._rows = rows.repeat_interleave(lengths)
        self.counts = self._rows >= 0
        """[T] bool, whether the token is of a sequence that counts, not of a dummy."""
        self.rows = rows[self._kept].cpu()
        """[S] int64, rows of these sequences in the batch, on the CPU."""

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Return each counted token's sequence row, and its position there: [n] int64."""
        return self._rows[self.counts], self._inside[self.counts]

    def digests(self, columns: Sequence[Tensor]) -> Tensor:
        """Return [C, S] int64, the digests of each sequence that counts, by column [T, ...]."""
        weights = odd_weights(0, int(self._inside.max()) + 1, dim=1, device=self._inside.device)
        terms = torch.stack([_of_tokens(column) for column in columns]) * weights[self._inside]
        # Differences of running sums are exact modulo 2**64.
        summed = torch.nn.functional.pad(terms.cumsum(1), (1, 0))
        return summed[:, self._starts].diff(dim=1)[:, self._kept]


def _of_tokens(column: Tensor) -> Tensor:
    """Return [T] int64 for a column [T, ...]: Y of the module's docstring, one word per element."""
    bits = as_bits(column).long()
    if column.element_size() == 8:
        bits = bits + (bits >> 32)
    if bits.dim() == 1:
        return bits
    bits = bits.flatten(1)
    return (bits * odd_weights(0, bits.shape[1], dim=0, device=bits.device)).sum(1)


def whole(digests: Tensor, rows: Tensor) -> Tensor:
    """Return [C] int64, digests of whole columns, from the [C, S] digests of their sequences.

    Args:
        rows: [S] int64, rows of the sequences in the batch, on the CPU.
    """
    if not len(rows):
        return digests.sum(1)
    weights = odd_weights(0, int(rows.max()) + 1, dim=2, device=digests.device)
    return (digests * weights[rows.to(digests.device)]).sum(1)
