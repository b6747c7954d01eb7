"""vLLM over files of quantised weights, of more than text, or of other names than released ones, as
over a plain folder.

Trainers send the plain weights of a text model, so an engine must hold such: vLLM is told nothing
of the quantisation or the other parts, and what it loads are the tensors that trainers load, under
their names, made plain one by one (model/files/quantised.py, model/files/reader.py). What vLLM
makes of them after loading, and so the proof of layout, is that of a plain folder.

Uses vLLM's documented register_model_loader, and get_all_weights of its own loader (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.files.quantised import QUANTISATION_KEYS, quantisation
from spmdrl.model.files.reader import CheckpointReader, TextPart, text_config, text_part
from spmdrl.model.load import model_folder
from spmdrl.model.transformers_internals import has_towers

_FORMAT = "spmdrl_plain"


def with_plain_weights(cfg: Config, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine that holds the plain weights of `model.path`.

    Args:
        arguments: of vLLM's EngineArgs; returned as they are where the files are plain.
    """
    folder = model_folder(cfg.model.path)
    text = text_part(str(folder)) if cfg.model.part == "text" else None
    is_quantised = bool(quantisation(json.loads((folder / "config.json").read_text())))
    if not is_quantised and not CheckpointReader(folder, part=cfg.model.part).named:
        return arguments
    _register(cfg.model.part)
    overrides = {**(arguments.get("hf_overrides") or {}), **dict.fromkeys(QUANTISATION_KEYS)}
    said = partial(_text_alone, text, overrides) if text else overrides
    return arguments | {"load_format": _FORMAT, "hf_overrides": said}


def _text_alone(text: TextPart, overrides: dict[str, Any], config: Any) -> Any:
    """Return the text model's own config of a transformers config, as vLLM's hf_overrides asks."""
    if not has_towers(config):  # vLLM tries with an empty one first
        return config
    own = text_config(config)
    own.update({"architectures": [text.architecture], "tie_word_embeddings": text.is_tied})
    own.update(overrides)
    return own


def _register(part: str) -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader(_FORMAT)
    class PlainModelLoader(DefaultModelLoader):
        """vLLM's own loader, given the weights that the quantised ones of a folder stand for."""

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
            """Yield every tensor by its name in a plain folder: quantised ones in the engine's
            dtype, others in their own."""
            reader = CheckpointReader(model_folder(model_config.model), part=part)
            for name in sorted(reader.names()):
                shape = reader.shape(name)
                tensor = reader.read(name, start=(0,) * len(shape), shape=shape)
                is_quantised = reader.is_quantised(name)
                yield name, tensor.to(model_config.dtype) if is_quantised else tensor
