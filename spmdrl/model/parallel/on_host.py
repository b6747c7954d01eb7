"""Keep what blocks save for the backward pass on the host, and bring it back in time.

Copies run beside the computation, on a stream of their own. While a block computes, the tensors of
the block before go to the host; their memory is used again once they are there. In the backward
pass, the tensors of the block before come back while a block computes. So the device holds the
tensors of two blocks. No value changes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from spmdrl.model.tensor_parts import local_part
from spmdrl.world.torch_internals import Wrapper, storage_id, tree_leaves, write_count

_LEAST_BYTES = 1024
"""Tensors below this stay on the device: a copy costs more than it frees."""


def keep_on_host(hf_model: nn.Module, names: Iterable[str]) -> None:
    """Wrap blocks so that tensors saved by autograd are kept on the host until the backward pass.

    Weights stay on the device, and so do keyword arguments, which all blocks share. With full
    checkpointing only a block's input moves.

    Args:
        names: of the blocks, first to last.
    """
    for name in names:
        hf_model.set_submodule(name, _OnHost(hf_model.get_submodule(name)))


class _OnHost(Wrapper):
    """A block whose saved tensors are kept on the host."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        with _saving_to_host(self, shared=tree_leaves(kwargs)):
            return self.block(*args, **kwargs)


# --------------------------------------------------------------------------- copies


class Beside:
    """Copies of a device that run beside its computation, in order. On the CPU they run at once.

    A copy begins after all work that is launched when it is asked for.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_async = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_async else None
        self._leaving: deque[tuple[Any, _Block]] = deque()
        self._coming: Any = None  # mark and memory of what was asked for before it is needed
        self._last: Any = lambda: None  # weak: the last block that ran

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Copy tensors; return a mark that `wait` takes."""
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Let what is launched from now on run after the copies up to a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def begin(self) -> _Block:
        """Return a new block, which follows the last one."""
        block = _Block(self, self._last)
        self._last = weakref.ref(block)
        return block

    def leave(self, block: _Block) -> None:
        """Free the memory of the block before this one, whose tensors are on the host by now."""
        self._leaving.append((block.left, block))
        while len(self._leaving) > 1:
            mark, before = self._leaving.popleft()
            self.wait(mark)
            before.free()

    def fetch(self, storages: Sequence[_Storage]) -> None:
        """Start to bring storages back to the device."""
        # Memory of the computing stream: it goes back there, and must not be used again before the
        # copy has ended, whoever needs the tensors.
        for storage in storages:
            assert storage.host is not None
            storage.here = torch.empty_like(storage.host, device=self.device)
        here = [storage.here for storage in storages]
        self.arrive()
        if storages:
            self._coming = (self.copy(here, [storage.host for storage in storages]), here)

    def arrive(self) -> None:
        """Have what was fetched on the device for what is launched next."""
        if self._coming is not None:
            mark, _ = self._coming
            self.wait(mark)
            self._coming = None

    def host_room(self, like: Tensor) -> Tensor:
        """Return memory of the host for a tensor, pinned so that the host need not wait."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.is_async)


@cache
def beside(device: torch.device) -> Beside:
    """Return what copies of a device run on."""
    return Beside(device)


@dataclass(eq=False)
class _Storage:
    """A storage that is saved, as [bytes] uint8: on the device, on the host, or on both."""

    here: Tensor | None
    host: Tensor | None


class _Block:
    """What one pass through a block saves.

    Args:
        before: returns what the block before saved; None if that is gone.
    """

    def __init__(self, own: Beside, before: Any):
        self._own = own
        self._before = before
        self._storages: list[Any] = []  # weak: memory is freed as soon as autograd is done with it
        self._is_back = False
        self._is_here = False
        self.left: Any = None
        """The mark after which all is on the host."""

    def save(self, tensor: Tensor) -> _Storage:
        """Start to copy a tensor's storage to the host."""
        here = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        here.set_(tensor.untyped_storage())
        storage = _Storage(here, self._own.host_room(here))
        self.left = self._own.copy([storage.host], [here])
        self._storages.append(weakref.ref(storage))
        return storage

    def free(self) -> None:
        """Drop what is on the device, unless the backward pass is here already."""
        if not self._is_back:
            for storage in self._known():
                storage.here = None

    def _known(self) -> Iterator[_Storage]:
        return filter(None, (reference() for reference in self._storages))

    def fetch(self) -> None:
        """Start to bring back what is not on the device."""
        if not self._is_back:
            self._is_back = True
            self._own.fetch([storage for storage in self._known() if storage.here is None])

    def come_back(self) -> None:
        """Have everything on the device for what is launched next, and fetch the block before."""
        if self._is_here:
            return
        self._is_here = True
        self.fetch()
        self._own.arrive()
        before = self._before()
        if before is not None:
            before.fetch()


# --------------------------------------------------------------------------- hooks of autograd


@dataclass(frozen=True)
class _Away:
    """A view of a storage on the host. It keeps its strides: with others, kernels may add up in
    another order."""

    block: _Block
    storage: _Storage
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]  # offset, size, stride

    def back(self) -> Tensor:
        """Return the tensor, on its device."""
        self.block.come_back()
        here = self.storage.here
        assert here is not None
        tensor = torch.empty(0, dtype=self.dtype, device=here.device)
        return tensor.set_(here.untyped_storage(), *self.view)


@contextmanager
def _saving_to_host(block: nn.Module, *, shared: Sequence[Any]) -> Iterator[None]:
    stays = {_storage(value) for value in shared if isinstance(value, Tensor)}
    # A storage that several tensors share is copied once. It is kept until the block has run, so
    # that no other storage gets its identity.
    seen: dict[tuple[int, int], tuple[Tensor, _Storage]] = {}
    blocks: dict[torch.device, _Block] = {}

    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor | _Away:
        if isinstance(tensor, DTensor) or tensor.nbytes < _LEAST_BYTES:
            return tensor
        place = _storage(tensor)
        key = (place, write_count(tensor))
        if key not in seen:
            # Looked up each time: experts are gathered inside the block, by a unit of their own.
            if place in stays or any(_storage(p) == place for p in block.parameters()):
                return tensor
            if tensor.device not in blocks:
                blocks[tensor.device] = beside(tensor.device).begin()
            seen[key] = (tensor, blocks[tensor.device].save(tensor))
        own = blocks[tensor.device]
        view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return _Away(own, seen[key][1], tensor.dtype, view)

    with saved_tensors_hooks(pack, _back):
        yield
    seen.clear()
    for device, own in blocks.items():
        beside(device).leave(own)


def _storage(tensor: Tensor) -> int:
    """Return the identity of a storage, valid while it exists; FSDP2 frees and reuses memory."""
    return storage_id(local_part(tensor))


@torch.compiler.disable
def _back(saved: Tensor | _Away) -> Tensor:
    return saved.back() if isinstance(saved, _Away) else saved
