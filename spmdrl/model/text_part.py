"""The text model within one that sees or hears: which of its tensors are the text model's.

Under `model.part: text` a folder of such a model is read as if it were one of its text model alone:
under the names of that, and without the rest. Which name stands for which is what transformers'
classes of both say of the same tensors, so that there is no table of families here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.blocks import base_of, name_of
from spmdrl.model.file_tensors import file_tensors

_TOWERS = ("vision_config", "audio_config")


@dataclass(frozen=True)
class TextPart:
    """A text model within a larger one."""

    names: dict[str, str]  # {name in files of the text model alone: name in those of the whole}
    prefix: str  # with which all names of the whole's files begin that are below the head
    is_tied: bool  # whether the whole has the embedding's rows for its head
    architecture: str  # class of the text model alone


def has_towers(config: Any) -> bool:
    """Return whether a transformers config is of a model that takes more than text."""
    return any(getattr(config, name, None) is not None for name in _TOWERS)


def text_config(config: Any) -> Any:
    """Return a copy of the text model's part of a transformers config."""
    return copy.deepcopy(config.get_text_config())


@cache
def text_part(path: str) -> TextPart | None:
    """Return where the text model of a folder or hub model lies; None if it is all there is.

    Raises: Refusal for a model whose text model transformers does not have by itself, or cannot
        be told from the rest.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path)
    if not has_towers(config):
        return None
    what = f"model.part: text of a {config.model_type} ({path}) cannot be told from the rest"
    with refusing(what, Exception, names_kind=True):  # of classes of any kind
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config)
        own = text_config(config)
        own.tie_word_embeddings = _is_tied(whole)
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(own)
        return _located(whole, text)


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
    return TextPart(names, _common(below), _is_tied(whole), type(text).__name__)


def _common(names: list[str]) -> str:
    """Return the parts with which all names begin, with a dot at the end; empty for none."""
    shared = []
    for parts in zip(*(name.split(".") for name in names)):
        if len({*parts}) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared)
