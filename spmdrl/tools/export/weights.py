"""The policy's tensors in a checkpoint, read whole and one at a time, by one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from spmdrl.checkpoint import manifest as disk

# Parts of a checkpoint: prefixes of the tensors' own names.
_MODEL = "model."
_LORA = "lora."


class SavedWeights:
    """The policy's tensors in a checkpoint of any layout.

    Args:
        checkpoint: its folder.
    """

    def __init__(self, checkpoint: Path):
        self._folder = checkpoint / disk.POLICY
        self._entries = disk.TensorReader(self._folder).read_metadata().state_dict_metadata
        names = [name for name in self._entries if name.startswith(_MODEL)]
        self.dtypes = {n.removeprefix(_MODEL): self._entries[n].properties.dtype for n in names}
        """{name: dtype} of every parameter and persistent buffer that training may change."""
        self.has_adapters = f"{_LORA}base" in self._entries

    def read(self, name: str) -> Tensor:
        """Return a tensor of the policy, whole, on the CPU."""
        return self._read(_MODEL + name)

    def record(self, name: str) -> Tensor:
        """Return a number of the adapters: alpha, use_rslora or base; see AdapterRecord."""
        return self._read(_LORA + name)

    def _read(self, key: str) -> Tensor:
        entry = self._entries[key]
        tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings():
            # DCP warns that there is one process only, as is meant here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = disk.TensorReader(self._folder)
            try:
                dcp.load(tensors, storage_reader=reader, no_dist=True)
            except dcp.api.CheckpointException as error:
                raise disk.unreadable(reader, error) from error
        return tensors[key]
