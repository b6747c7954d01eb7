"""The safetensors files of a model's folder, read by slice.

With `model.part: text` the folder of a multimodal model is read as a folder of its text model: by
the names of that model, and without other tensors. Which names belong together is found from
transformers' classes of both models, so that no table of families is needed.
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
    prefix: str  # prefix of all file names of the whole that are not the head
    is_tied: bool  # whether the head of the whole is its embedding
    heads: dict[str, str]  # {name of the text model's head alone: name in the whole}
    architecture: str  # class of the text model alone


_CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4v_moe_text": ("glm4_moe", {"use_qk_norm": False}),
    "glm4v_text": ("glm4", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
}
"""{model type of a text part that has no class with a head: (the model type that computes the same
for text, fields that say what the part's code always does)}. Tests prove each."""


def text_config(config: Any) -> Any:
    """Return a copy of the text config in a transformers config, for a class with a head.

    Without images the three axes of rotary positions are equal, so a model of one axis is the same.
    """
    from transformers import AutoConfig

    own = copy.deepcopy(config.get_text_config())
    if own.model_type not in _CAUSAL:
        return own
    model_type, always = _CAUSAL[own.model_type]
    fields = {name: value for name, value in own.to_dict().items() if name != "model_type"}
    fields.setdefault("head_dim", own.hidden_size // own.num_attention_heads)
    rope = {n: value for n, value in own.rope_parameters.items() if not n.startswith("mrope_")}
    # By default GLM-4 rotates half of a head, and GLM-4.1V all of it.
    fields["rope_parameters"] = {"partial_rotary_factor": 1.0} | rope
    return AutoConfig.for_model(model_type, **(fields | always))


@cache
def text_part(path: str) -> TextPart | None:
    """Return where the text model of a folder or hub model is; None if it is the whole model.

    Raises: Refusal if transformers has no class for the text model alone, or if its tensors cannot
        be found among those of the whole.
    """
    from transformers import MODEL_MAPPING, AutoConfig, AutoModelForCausalLM

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
        theirs = type(config.get_text_config())
        kind = type(base_of(text)[1]) if type(own) is theirs else MODEL_MAPPING[theirs]
        return _located(whole, text, kind=kind)


@cache
def instead(path: str) -> str:
    """Return how a refusal of a model with towers may end: that its text part can be trained alone.

    Empty if that would be refused too.
    """
    found, _ = attempt(lambda: text_part(path), Exception)  # of any config
    return "" if found is None else ", or set model.part to text"


def _is_tied(hf_model: nn.Module) -> bool:
    head = hf_model.get_output_embeddings()
    return head.weight is hf_model.get_input_embeddings().weight


def _located(whole: nn.Module, text: nn.Module, *, kind: type) -> TextPart:
    """Return where the text model is in the whole.

    Args:
        kind: class of its base in the whole.
    """
    prefix, _ = base_of(text)
    places = [name for name, module in whole.named_modules() if type(module) is kind]
    if len(places) != 1:
        raise Refusal(f"it has {len(places)} parts of the class {kind.__name__}")
    heads = [name_of(model, model.get_output_embeddings()) for model in (whole, text)]
    live = {places[0]: prefix, heads[0]: heads[1]}  # of the whole, and alone
    theirs = {}
    # The files of a tower may hold its tensors in forms that are not known here.
    for name, part in file_tensors(whole, within=[f"{place}." for place in live]).items():
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
    # Of lists of words, not of characters: q_proj and q_norm share no prefix.
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
    """The tensors of a folder's safetensors files, read by slice and dequantised.

    Args:
        folder: of the files.
        part: model.part; with `text` there are only the text model's tensors, by its own names.
    Raises: Refusal if the folder has no safetensors weights, a file is unreadable, or the
        quantisation is not known.
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
        """Names of tensors that are left out by `part`."""
        self.tied_heads: dict[str, str] = {}
        """{name of a text model's tied head: name of its copy in the files}."""
        self.named = released_names(config, found) if part == "all" else {}
        """{name of a tensor: its name in the files}, where they differ."""
        self._names = (found - {*self.named.values()}) | self.named.keys()
        if part == "text" and (text := text_part(str(folder))):
            self._show(text)

    def _show(self, text: TextPart) -> None:
        self.named = {own: name for own, name in text.names.items() if name in self._names}
        shown = {*self.named.values()}
        # These stay visible, so that `check_weights` refuses them as extra.
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
        """Whether a tensor is quantised in the files."""
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
        """Return {name: file} of all tensors in the files of an index.

        Raises: Refusal if transformers and vLLM would read different tensors for a name.
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
        """Return why a tensor of the files cannot fill a tensor of a dtype; empty if it can.

        Only headers are read.

        Args:
            dtype: of the tensor to fill; any dtype of the same class is accepted.
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
        """Return one box of a tensor on the CPU, in the dtype of the file, or float32 if quantised.

        Raises: Refusal if the scales do not fit the tensor.
        """
        name = self.named.get(name, name)
        if own := self._quantised.get(name):
            with refusing(f"model.path: {self.folder}", ValueError):
                return own.read(self, start, shape)
        return self.raw(name, start, shape)

    def raw_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is stored."""
        return tuple(self._slice(name).get_shape())

    def raw_dtype(self, name: str) -> str:
        """Return the dtype of a tensor as it is stored, as safetensors spells it."""
        return self._slice(name).get_dtype()

    def place(self, name: str) -> str:
        """Return a tensor's name and its file, for messages."""
        name = self.named.get(name, name)
        return f"{name} in {self.folder / self._file_of.get(name, '')}"

    def raw(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return one box of a tensor as it is stored."""
        box = tuple(slice(s, s + n) for s, n in zip(start, shape))
        what = f"model.path: {name} in {self.folder / self._file_of[name]} cannot be read"
        with refusing(what, SafetensorError, OSError, RuntimeError):  # such as dtypes below a byte
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
    """Return the dtypes of safetensors that can fill a tensor of a dtype."""
    if dtype.is_floating_point:
        return _PLAIN
    return ("BOOL",) if dtype is torch.bool else _INTEGERS


_KINDS = (OSError, ValueError, AttributeError, TypeError, RecursionError)
"""Errors that reading any config.json may raise."""


def _config_of(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json; {} without one. Raises: Refusal."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    with refusing(f"model.path: {file} cannot be used", *_KINDS):
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no mapping")
        return found


def some(names: Iterable[str], limit: int = 8) -> str:
    """Return the first few names, sorted, as a text."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more
