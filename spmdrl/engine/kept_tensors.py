"""Tensors of a sleeping engine that are neither restored by it nor written by a push."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class KeptTensors:
    """Copies on the host, to be written back to the same memory.

    Args:
        tensors: live; their values are copied now.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            self._pairs.append((tensor, tensor.detach().to("cpu", copy=True)))

    def restore(self) -> None:
        """Write the copies back."""
        # Tensors that were made in inference mode may be written in it alone.
        with torch.inference_mode():
            for tensor, copy in self._pairs:
                tensor.copy_(copy)
