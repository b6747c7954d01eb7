"""The peak memory of a block of work, on CPU or GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmdrl.world.machine.host_memory import host_memory
from spmdrl.world.torch_internals import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of host storages that operations made and that are still alive.

    Memory that tensors had when it was made is not counted, though operations return views of it.
    It looks at every operation, which is slow: it is for models that a CPU can train.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref, int]] = {}
        """{id: (storage, the bytes that it had when an operation returned it)}."""
        tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
        storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu"]
        self._before = {id(s): weakref.ref(s) for s in storages if s.nbytes()}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        has_grown = False
        for tensor in tree_leaves(result):
            if isinstance(tensor, DTensor):
                # Its own storage has no memory, but a size: where its part of the whole ends.
                with torch.no_grad():
                    tensor = tensor.to_local()
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                has_grown |= self._track(tensor.untyped_storage())
        # Most operations return views, or the tensor that they wrote.
        if has_grown:
            self.peak = max(self.peak, self.now())
        return result

    def _track(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage from now on; return whether it is new or has another size."""
        known = self._before.get(id(storage))
        if known is not None and known() is storage:
            return False
        size = storage.nbytes()
        tracked, tracked_size = self._storages.get(id(storage), (None, 0))
        if tracked is not None and tracked() is storage and tracked_size == size:
            return False
        self._storages[id(storage)] = (weakref.ref(storage), size)
        return True

    def now(self) -> int:
        """Return the bytes that are alive. FSDP2 empties storages and keeps them."""
        alive = 0
        for key, (reference, _) in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                alive += storage.nbytes()
        return alive


@dataclass
class Peak:
    """Peak memory of a block, above what was allocated before it."""

    bytes: int = 0


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Measure the block inside. `bytes` is set when it ends."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with LiveBytes() as live:
        yield peak
    peak.bytes = live.peak


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the GPU, or by all processes of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] - device_bytes(device)
    gc.collect()
    return host_memory().free


def device_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are in use by any process."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # memory that torch caches is free too
    free, total = torch.cuda.mem_get_info(device)
    return total - free
