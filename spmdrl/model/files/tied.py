"""Copies of tied tensors: a model has one tensor under two names, and files may store both.

transformers ties the two only if the files have the same values under both names; otherwise it
loads two tensors. vLLM ties them by config.json alone. Copies with different values are refused,
because the trained model would not be the served one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from spmdrl.errors import Refusal
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.tensor_parts import Part
from spmdrl.model.transformers_internals import as_saved

_SAMPLED = 64
"""Rows that are compared before a run; all of them are compared when it loads the weights."""

_ROWS = 1024
"""Rows that are compared at a time."""


def tied_names(hf_model: nn.Module, parts: Mapping[str, Part]) -> dict[str, str]:
    """Return {name of a possible copy in files: name in files of the tensor that it is tied to}.

    Args:
        hf_model: as it was built, tied tensors tied.
        parts: of the model, see file_tensors.
    """
    own = {id(tensor): name for name, tensor in live_tensors(hf_model).items()}
    whole = {
        part.tensor: name
        for name, part in parts.items()
        if part == Part.whole(part.tensor, tuple(part.box.shape))
    }
    found = {}
    for alias, tensor in hf_model.named_parameters(remove_duplicate=False):
        live = own[id(tensor)]
        if alias == live or live not in whole:
            continue
        placeholder = torch.empty(tensor.shape, device="meta")
        for name in (alias, *as_saved(hf_model, {alias: placeholder})):
            found[name] = whole[live]
    return found


def copies_in(reader: CheckpointReader, tied: Mapping[str, str]) -> dict[str, str]:
    """Return {name of a copy in the files: name of the tensor that it is tied to}.

    Args:
        tied: as `tied_names` returns.
    """
    names = reader.names()
    found = {}
    for copy, name in tied.items():
        copy = reader.tied_heads.get(copy, copy)
        if (copy in names or copy in reader.tied_heads.values()) and name in names:
            found[copy] = name
    return found


def check_sample(reader: CheckpointReader, copies: Mapping[str, str]) -> None:
    """Compare some rows of each copy with its tensor, including the first and the last.

    Args:
        copies: as `copies_in` returns.
    Raises: Refusal for a copy with another shape or other values.
    """
    for copy, name in copies.items():
        shape = reader.shape(name)
        if reader.shape(copy) != shape:
            raise _refused(reader, copy, name, f"of shape {list(reader.shape(copy))}")
        if not shape or 0 in shape:
            continue
        places = torch.linspace(0, shape[0] - 1, min(shape[0], _SAMPLED)).tolist()
        for row in sorted({int(place) for place in places}):
            start = (row, *[0] * (len(shape) - 1))
            _check_rows(reader, copy, name, start=start, shape=(1, *shape[1:]))


def check_copy(
    reader: CheckpointReader,
    copy: str,
    name: str,
    *,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    """Compare one box of a copy with its tensor, some rows at a time.

    Raises: Refusal where values differ.
    """
    for row in range(0, shape[0], _ROWS):
        rows = min(_ROWS, shape[0] - row)
        place = (start[0] + row, *start[1:])
        _check_rows(reader, copy, name, start=place, shape=(rows, *shape[1:]))


def _check_rows(
    reader: CheckpointReader,
    copy: str,
    name: str,
    *,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    own = reader.read(name, start=start, shape=shape).double()
    other = reader.read(copy, start=start, shape=shape).double()
    if torch.equal(own, other):
        return
    gap = (own - other).abs().nan_to_num(nan=float("inf"))
    raise _refused(reader, copy, name, f"with values up to {float(gap.max()):.3g} apart")


def _refused(reader: CheckpointReader, copy: str, name: str, how: str) -> Refusal:
    return Refusal(
        f"model.path: config.json of {reader.folder} ties {copy} to {name} (tie_word_embeddings), "
        f"but the files hold both, {how}: transformers would load two tensors and vLLM one. Set "
        "tie_word_embeddings to false in config.json (and in its text_config, if it has one) to "
        f"have the files' {copy}, or remove {copy} from the files to have them tied"
    )
