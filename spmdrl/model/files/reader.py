"""The safetensors files of a model's folder, read by slice.

Under `model.part: text` the folder of a model that sees or hears is read as if it were one of its
text model alone: under the names of that, and without the rest. Which name stands for which is what
transformers' classes of both say of the same tensors, so that there is no table of families here.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.imports import attempt, parsed_json, refusing
from spmdrl.model.blocks import base_of, name_of
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.files.quantised import quantisation, quantised_tensors
from spmdrl.model.transformers_internals import class_of, has_towers, released_names


@dataclass(frozen=True)
class TextPart:
    """A text model within a larger one."""

    names: dict[str, str]  # {name in files of the text model alone: name in those of the whole}
    prefix: str  # with which all names of the whole's files begin that are below the head
    is_tied: bool  # whether the whole has the embedding's rows for its head
    heads: dict[str, str]  # {name of the text model's head alone: name in the whole}
    architecture: str  # class of the text model alone


def text_config(config: Any) -> Any:
    """Return a copy of the text model's part of a transformers config."""
    return copy.deepcopy(config.get_text_config())


@cache
def text_part(path: str) -> TextPart | None:
    """Return where the text model of a folder or hub model lies; None if it is all there is.

    Raises: Refusal for a model whose text model transformers does not have by itself, or cannot
        be told from the rest.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    if not has_towers(config):
        return None
    what = f"model.part: text of a {config.model_type} ({path}) cannot be told from the rest"
    with refusing(what, Exception, names_kind=True):  # of classes of any kind
        with torch.device("meta"):
            whole = class_of(config).from_config(config)
        own = text_config(config)
        own.tie_word_embeddings = _is_tied(whole)
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(own)
        return _located(whole, text)


@cache
def instead(path: str) -> str:
    """Return what a refusal of a model with towers, or of what is asked of it, may end with: that
    its text part can be trained alone; empty where that would be refused too."""
    found, _ = attempt(lambda: text_part(path), Exception)  # of any config
    return "" if found is None else ", or set model.part to text"


def _is_tied(hf_model: nn.Module) -> bool:
    head = hf_model.get_output_embeddings()
    return head.weight is hf_model.get_input_embeddings().weight


def _located(whole: nn.Module, text: nn.Module) -> TextPart:
    prefix, base = base_of(text)
    places = [name for name, module in whole.named_modules() if type(module) is type(base)]
    if len(places) != 1:
        raise Refusal(f"it has {len(places)} parts of the class {type(base).__name__}")
    heads = [name_of(model, model.get_output_embeddings()) for model in (whole, text)]
    live = {places[0]: prefix, heads[0]: heads[1]}  # of the whole, and alone
    theirs = {}
    for name, part in file_tensors(whole).items():
        for before, after in live.items():
            if part.tensor.startswith(f"{before}."):
                own = after + part.tensor.removeprefix(before)
                theirs[own, part.box, part.dims] = name
    parts = file_tensors(text)
    names = {
        name: theirs.get((part.tensor, part.box, part.dims), "") for name, part in parts.items()
    }
    missing = [name for name, file in names.items() if not file]
    if missing:
        raise Refusal(f"{len(missing)} of its tensors are not in the whole, {missing[0]} first")
    below = [names[n] for n, part in parts.items() if part.tensor.startswith(f"{prefix}.")]
    shared = os.path.commonprefix([name.split(".") for name in below])
    start = "".join(f"{part}." for part in shared)
    own_heads = {f"{heads[1]}.weight": f"{heads[0]}.weight"}
    return TextPart(names, start, _is_tied(whole), own_heads, type(text).__name__)


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights, whole or not."""
    return (folder / _INDEX).is_file() or any(folder.glob("*.safetensors"))


def check_files(folder: Path) -> None:
    """Read the headers of a folder's files of weights.

    Raises: Refusal as `CheckpointReader`, for each file that its index names.
    """
    reader = CheckpointReader(folder)
    for name in reader.names():
        reader.shape(name)


class CheckpointReader:
    """The tensors of a folder's safetensors files, read by slice; quantised ones made plain.

    Args:
        folder: of the files.
        part: model.part; `text` shows the text model's tensors, by the names of that model alone.
    Raises: Refusal when the folder has no safetensors weights or a file is unreadable, or they
        are quantised in a way that is not known.
    """

    def __init__(self, folder: Path, *, part: str = "all"):
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._read_index()
        config = _config_of(folder)
        with refusing(f"model.path: {folder / 'config.json'} cannot be used", *_KINDS):
            own = quantisation(config)
        self._quantised, hidden = quantised_tensors(own, self._file_of)
        found = (self._file_of.keys() | self._quantised.keys()) - hidden
        self.rest: set[str] = set()
        """Names of tensors that are no part of what is shown."""
        self.tied_heads: dict[str, str] = {}
        """{name of a text model's tied head: name of the copy that the files hold of it}."""
        self.named = released_names(config, found) if part == "all" else {}
        """{name of a tensor: that in the files}, where they differ."""
        self._names = (found - {*self.named.values()}) | self.named.keys()
        if part == "text" and (text := text_part(str(folder))):
            self._show(text)

    def _show(self, text: TextPart) -> None:
        self.named = {own: name for own, name in text.names.items() if name in self._names}
        shown = {*self.named.values()}
        unknown = {n for n in self._names - shown if n.startswith(text.prefix)}
        self.rest = self._names - shown - unknown
        if text.is_tied:  # a copy would be that of another embedding once this one is trained
            self.tied_heads = {
                own: name
                for own, head in text.heads.items()
                for name in self.rest
                if f".{name}".endswith(f".{head}")
            }
            self.rest -= {*self.tied_heads.values()}
        self._names = self.named.keys() | unknown

    def is_quantised(self, name: str) -> bool:
        """Whether the files hold a tensor in fewer bits than are returned."""
        return self.named.get(name, name) in self._quantised

    def _read_index(self) -> dict[str, str]:
        index = self.folder / _INDEX
        if index.is_file():
            what = f"model.path: {index} is not a weight index"
            content, why = parsed_json(index.read_text(errors="replace"))
            places = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(places, dict):
                raise Refusal(f"{what}: {why or 'it has no mapping `weight_map`'}")
            for name, file in places.items():
                if not isinstance(file, str) or PurePath(file).name != file:
                    raise Refusal(f"{what}: {name} is said to be in {file!r}, no file beside it")
            return self._in_files(places)
        if not (self.folder / _SINGLE).is_file():
            found = some(p.name for p in self.folder.iterdir())
            raise Refusal(
                f"model.path: {self.folder} has neither {_SINGLE} nor {_INDEX}, only "
                f"{found}; convert the weights to safetensors"
            )
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _in_files(self, places: dict[str, str]) -> dict[str, str]:
        """Return {name: file} of all that the files of an index hold, as transformers and vLLM read
        them.

        Raises: Refusal where it depends on the reader which tensor a name stands for.
        """
        files = sorted(set(places.values()))
        if (self.folder / _SINGLE).is_file() and files != [_SINGLE]:
            raise Refusal(
                f"model.path: {self.folder} has {_SINGLE}, which transformers loads, and {_INDEX} "
                f"of {some(files)}, which vLLM loads; remove the one that is not the model"
            )
        found: dict[str, str] = {}
        for file in files:
            names = self._open(file).keys()
            for name in names:
                if name in found:
                    raise Refusal(
                        f"model.path: {name} is in two files of {self.folder}, {found[name]} and "
                        f"{file}; remove it from the one that should not have it"
                    )
                found[name] = file
        for name, file in places.items():
            if found.get(name) != file:
                raise Refusal(
                    f"model.path: {self.folder / file} does not hold {name}, which {_INDEX} says "
                    f"it does; it is in {found.get(name, 'no file')}. Write the index again"
                )
        return found

    def _open(self, file: str) -> Any:
        if file not in self._files:
            hint = "; the file is missing, cut short or corrupted"
            what = f"model.path: cannot read {self.folder / file}"
            with refusing(what, SafetensorError, OSError, hint=hint):
                self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._names)

    def files(self) -> set[str]:
        """Return the names of the files that hold them."""
        return set(self._file_of.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, read from the file's header."""
        name = self.named.get(name, name)
        own = self._quantised.get(name)
        return own.shape(self) if own else self.raw_shape(name)

    def misfit(self, name: str, dtype: torch.dtype) -> str:
        """Return why what the files hold under a name gives no values of a dtype, read from the
        files' headers; empty where it does.

        Args:
            dtype: of the tensor that is to be filled; any of its class is right.
        """
        name = self.named.get(name, name)
        if own := self._quantised.get(name):
            return own.misfit(self)
        found = self.raw_dtype(name)
        if found in _kinds_of(dtype):
            return ""
        where = f"{name} in {self.folder / self._file_of[name]} is {found}"
        if not dtype.is_floating_point:
            return f"{where}, and {dtype} is wanted"
        return (
            f"{where}, and a weight is one of {', '.join(_PLAIN)} where no quantization_config in "
            "config.json says how to read it; take the plain weights of this model"
        )

    def read(self, name: str, *, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return one box of a tensor, in the dtype of the file, on the CPU; float32 of one that the
        file holds in fewer bits.

        Raises: Refusal for one whose scales do not fit it.
        """
        name = self.named.get(name, name)
        if own := self._quantised.get(name):
            with refusing(f"model.path: {self.folder}", ValueError):
                return own.read(self, start, shape)
        return self.raw(name, start, shape)

    def raw_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what the file holds under a name."""
        return tuple(self._slice(name).get_shape())

    def raw_dtype(self, name: str) -> str:
        """Return the dtype of what the file holds under a name, as safetensors spells it."""
        return self._slice(name).get_dtype()

    def place(self, name: str) -> str:
        """Return a tensor's name and its file, for messages."""
        name = self.named.get(name, name)
        return f"{name} in {self.folder / self._file_of.get(name, '')}"

    def raw(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return one box of what the file holds under a name."""
        box = tuple(slice(s, s + n) for s, n in zip(start, shape))
        what = f"model.path: {name} in {self.folder / self._file_of[name]} cannot be read"
        with refusing(what, SafetensorError, OSError, RuntimeError):  # dtypes below a byte, say
            if not box:  # which a slice cannot be cut from
                return self._open(self._file_of[name]).get_tensor(name)
            return self._slice(name)[box]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        where = f"{self.folder / file} does not hold {name}, which {_INDEX} says it does"
        with refusing(f"model.path: {where}", SafetensorError):
            return self._open(file).get_slice(name)


_PLAIN = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")


def _kinds_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the dtypes of safetensors whose values a tensor of a dtype can take."""
    if dtype.is_floating_point:
        return _PLAIN
    return ("BOOL",) if dtype is torch.bool else _INTEGERS


_KINDS = (OSError, ValueError, AttributeError, TypeError, RecursionError)
"""Of errors that a config.json gives that holds anything."""


def _config_of(folder: Path) -> dict[str, Any]:
    """Return what a folder's config.json holds; {} without one. Raises: Refusal."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    with refusing(f"model.path: {file} cannot be used", *_KINDS):
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no mapping")
        return found


def some(names: Iterable[str], limit: int = 8) -> str:
    """Return names in order as a text, the first few of them."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more
