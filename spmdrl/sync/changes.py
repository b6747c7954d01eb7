"""The elements that changed since the last push, as bytes: where they are, and their new bits.

Elements are compared as integers, so -0.0 and 0.0 differ, and a NaN equals a NaN of the same bits.
New bits are sent, not differences: a receiver that writes them holds what the sender holds.

Each block takes the smallest of three forms:

- whole: the bits of all elements;
- bitmap: a bit for each element that says whether it changed, and the bits of those that did;
- gaps: for each changed element, a byte with the number of unchanged elements before it, and its
  bits. A byte of 255 means 255 unchanged elements, and that more bytes follow for the same element.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from spmdrl.sync.verify import INTEGERS
from spmdrl.world.machine.hardware import LinkCost

WHOLE, BITMAP, GAPS = range(3)
HEADER = 3
"""int64 numbers that describe an encoded block: form, changed elements, bytes that say where."""

_FAR = 255
_ALIGN = 16  # bytes; a block's bits start at a multiple of it, so that any dtype can view them
_COMPARED = 4.0  # seconds to cast, compare and find what changed, in units of those of a copy


class Encoded(NamedTuple):
    """The changed elements of a block."""

    header: tuple[int, int, int]
    changed: int  # elements that changed; the header of the form `whole` counts all elements
    payload: Tensor  # [bytes] uint8, see payload_bytes


def bits_of(tensor: Tensor) -> Tensor:
    """Return the live bits of a contiguous tensor, flat: [elements] of an integer dtype."""
    return tensor.view(-1).view(INTEGERS[tensor.element_size()])


def encode(new: Tensor, kept: Tensor) -> Encoded:
    """Encode the elements that differ, and copy `new` into `kept`.

    Args:
        new: [N] bits to send.
        kept: [N] bits that were sent last.
    """
    places = _differing(new, kept)
    changed = len(places)
    bits_bytes = changed * new.itemsize
    header = (WHOLE, len(new), 0)
    parts = [new.view(torch.uint8)]
    if changed + bits_bytes < new.nbytes:  # a changed element takes at least a byte that says where
        form = GAPS
        where = _gaps(places)
        if -(-len(new) // 8) < len(where):
            form = BITMAP
            where = _bitmap(places, len(new))
        if len(where) + bits_bytes < new.nbytes:
            header = (form, changed, len(where))
            parts = [new.index_select(0, places).view(torch.uint8), where]
    kept.copy_(new)
    padding = payload_bytes(header, new.itemsize) - sum(len(part) for part in parts)
    payload = torch.cat([*parts, new.new_zeros(padding, dtype=torch.uint8)])
    return Encoded(header, changed, payload)


def payload_bytes(header: tuple[int, int, int], itemsize: int) -> int:
    """Return the bytes of an encoded block: its bits, where they belong, and padding."""
    _, count, where_bytes = header
    return -(-(count * itemsize + where_bytes) // _ALIGN) * _ALIGN


def write(target: Tensor, header: tuple[int, int, int], payload: Tensor) -> None:
    """Write an encoded block.

    Args:
        target: [N] live bits, so far equal to what the sender sent last.
        payload: [payload_bytes] uint8.
    """
    form, count, where_bytes = header
    if not count:
        return
    end = count * target.itemsize
    bits = payload[:end].view(target.dtype)
    if form == WHOLE:
        target.copy_(bits)
        return
    where = payload[end : end + where_bytes]
    places = _from_gaps(where) if form == GAPS else _from_bitmap(where, len(target))
    target.index_copy_(0, places, bits)


def _differing(new: Tensor, kept: Tensor) -> Tensor:
    """Return the indices at which two tensors differ, [n] int64."""
    if new.device.type == "cpu":  # numpy is faster
        return _places(torch.from_numpy(new.numpy() != kept.numpy()))
    return _places(new != kept)


def _places(mask: Tensor) -> Tensor:
    """Return the indices at which a mask is true, [n] int64."""
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1)
    flags = mask.numpy()
    if len(flags) % 8 == 0:
        words = flags.view(numpy.uint64)
        chosen = numpy.flatnonzero(words != 0)
        # Where few are true, most words of eight flags are 0: one look instead of eight.
        if 2 * len(chosen) < len(words):
            inside = numpy.flatnonzero(words[chosen].view(bool))
            first = chosen << 3
            return torch.from_numpy(first[inside >> 3] + (inside & 7))
    return torch.from_numpy(numpy.flatnonzero(flags))  # in a third of torch's time


def _gaps(places: Tensor) -> Tensor:
    between = _between(places)
    if not len(places) or int(between.max()) < _FAR:
        return between.to(torch.uint8)
    skips = torch.div(between, _FAR, rounding_mode="floor")
    ends = (skips + 1).cumsum(0) - 1
    gaps = torch.full((int(ends[-1]) + 1,), _FAR, dtype=torch.uint8, device=places.device)
    gaps[ends] = (between - _FAR * skips).to(torch.uint8)
    return gaps


def _between(places: Tensor) -> Tensor:
    """Return the number of elements between each place and the one before it, [n] int64."""
    if places.device.type != "cpu":
        return torch.diff(places, prepend=places.new_full((1,), -1)) - 1
    found = places.numpy().copy()  # in a third of torch's time
    found[1:] -= places.numpy()[:-1]
    found[1:] -= 1
    return torch.from_numpy(found)


def _from_gaps(gaps: Tensor) -> Tensor:
    last = gaps.cumsum(0, dtype=torch.int64)[_places(gaps != _FAR)]
    return last + torch.arange(len(last), device=gaps.device)


def _bitmap(places: Tensor, numel: int) -> Tensor:
    flags = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=places.device)
    flags[places] = 1
    shifts = torch.arange(8, dtype=torch.uint8, device=places.device)
    return (flags.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def _from_bitmap(bitmap: Tensor, numel: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    flags = (bitmap[:, None] >> shifts) & 1
    return _places(flags.flatten()[:numel] != 0)


# --------------------------------------------------------------------------- what pays


def encoded_share(changed_share: float, itemsize: int) -> float:
    """Return the bytes of a push of what changed, as a share of those of a full push.

    Args:
        changed_share: of the elements, spread evenly.
    """
    gaps = changed_share * (1 + itemsize) / itemsize
    bitmap = 1 / (8 * itemsize) + changed_share
    return min(1.0, gaps, bitmap)


def changes_s(nbytes: float, link: LinkCost, *, sent_share: float) -> float:
    """Return the seconds of a push of what changed.

    Args:
        nbytes: what the busiest rank sends or receives in a full push.
        sent_share: bytes that travel, as a share of those of a full push.
    """
    # A bucket is compared while the one before travels: the longer of both counts.
    compared = nbytes * _COMPARED / link.copy_bytes_per_s
    return max(compared, nbytes * sent_share / link.bytes_per_s) + link.round_s


def pays(nbytes: float, link: LinkCost, *, sent_share: float) -> bool:
    """Return whether a push of what changed takes less time than a full push."""
    return changes_s(nbytes, link, sent_share=sent_share) < nbytes / link.bytes_per_s
