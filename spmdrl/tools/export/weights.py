"""The policy's tensors in a checkpoint, read by one process: as they were saved, or with adapters
merged; and the adapters as a folder in PEFT's format."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from spmdrl.checkpoint import manifest as disk
from spmdrl.config import ModelSettings
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.files.digests import file_digest
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import build_meta_model
from spmdrl.model.lora.files import LAYER_A, base_digest, write_adapter
from spmdrl.model.lora.merge import low_rank_product
from spmdrl.model.lora.quantised_base import BaseForm
from spmdrl.model.lora.targets import pair_names
from spmdrl.model.tensor_parts import Box, Part, narrow

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
        """Return a number of the adapters, see AdapterRecord."""
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


class MergedWeights:
    """Weights with the adapters merged into them, in float32; read like SavedWeights.

    If the run quantised the weights, these are the dequantised ones: what was trained.

    Args:
        saved: a checkpoint of adapters.
        base: folder of the weights that they were trained on.
        parts: {name in its files: part of a live tensor}.
        quantisable: names of the weights that a run may quantise, see base_weights.
        part: model.part.
    Raises: Refusal when `base` has other weights.
    """

    def __init__(
        self,
        saved: SavedWeights,
        base: Path,
        parts: Mapping[str, Part],
        *,
        quantisable: Collection[str],
        part: str = "all",
    ):
        self._saved = saved
        self._parts = parts
        self._reader = CheckpointReader(base, part=part)
        found = base_digest({name: file_digest(base / name) for name in self._reader.files()})
        if found != int(saved.record("base")):
            raise Refusal(
                f"the checkpoint has adapters only, and they were trained on other "
                f"weights than those in {base}; name those by --model"
            )
        numbers = (int(saved.record(name)) for name in ("base_bits", "base_dtype"))
        self._form = BaseForm.of_numbers(*numbers)
        self._quantised = quantisable if self._form else ()
        self.dtypes = {part.tensor: torch.float32 for part in parts.values()}
        """{name: dtype} of every live tensor."""

    def read(self, name: str) -> Tensor:
        """Return a live tensor of the model, whole, on the CPU."""
        if name in self._saved.dtypes:  # a scalar head
            return self._saved.read(name)
        own = {file: part for file, part in self._parts.items() if part.tensor == name}
        whole = self._from_files(own)
        if self._form and name in self._quantised:
            whole = self._form.rounded(whole).float()
        names = pair_names(name)
        if names[0] in self._saved.dtypes:
            a, b = (self._saved.read(part) for part in names)
            whole += low_rank_product(b, a, scale=self._scale(rank=a.shape[-2]))
        return whole

    def _from_files(self, parts: Mapping[str, Part]) -> Tensor:
        ends = [[a + n for a, n in zip(p.box.start, p.box.shape)] for p in parts.values()]
        shape = tuple(map(max, zip(*ends)))
        whole = torch.empty(shape)
        for file, part in parts.items():
            view = part.as_in_file(narrow(whole, outer=Box.whole(shape), part=part.box))
            view.copy_(self._reader.read(file, start=(0,) * len(part.shape), shape=part.shape))
        return whole

    def _scale(self, *, rank: int) -> float:
        alpha = float(self._saved.record("alpha"))
        is_root = bool(self._saved.record("use_rslora"))
        return alpha / (math.sqrt(rank) if is_root else rank)


def export_adapter(
    saved: SavedWeights, out: Path, *, base: str, trust_remote_code: bool = False
) -> None:
    """Write the adapters of a checkpoint as PEFT does, in float32.

    Args:
        out: an existing folder.
        base: folder or hub name of the weights that they were trained on.
        trust_remote_code: run Python code that comes with `base`.
    Raises: Refusal when the checkpoint has none.
    """
    if not saved.has_adapters:
        raise Refusal(
            "--adapter: the checkpoint has whole weights, since the run had no "
            "model.lora; leave the flag out"
        )
    tensors = {name: saved.read(name) for name in saved.dtypes}
    rank = next(t.shape[-2] for name, t in tensors.items() if LAYER_A.search(name))
    write_adapter(
        out,
        tensors,
        rank=rank,
        alpha=float(saved.record("alpha")),
        use_rslora=bool(saved.record("use_rslora")),
        base=base,
        embedding=_embedding_name(ModelSettings(path=base, trust_remote_code=trust_remote_code)),
    )


def _embedding_name(model: ModelSettings) -> str:
    what = "--adapter needs the config of the weights under the adapters; name them by --model"
    with refusing(what, Refusal):
        hf_model = build_meta_model(model)
    embedding = hf_model.get_input_embeddings()
    return next(name for name, module in hf_model.named_modules() if module is embedding)
