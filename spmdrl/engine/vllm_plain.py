"""vLLM over files of quantised weights, as over a folder of the same weights in plain form.

Trainers send plain weights, so an engine must hold such: vLLM is told nothing of the quantisation,
and what it loads are the tensors that trainers load, made plain one by one (model/quantised.py).
What vLLM makes of them after loading, and so the proof of layout, is that of a plain folder.

Uses vLLM's documented register_model_loader, and get_all_weights of its own loader (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.load import CheckpointReader, model_folder
from spmdrl.model.quantised import quantisation

_FORMAT = "spmdrl_plain"


def with_plain_weights(cfg: Config, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine that holds the plain weights of `model.path`.

    Args:
        arguments: of vLLM's EngineArgs; returned as they are where the files are plain.
    """
    folder = model_folder(cfg.model.path)
    if not quantisation(json.loads((folder / "config.json").read_text())):
        return arguments
    _register()
    overrides = {"quantization_config": None, "compression_config": None}
    given = arguments.get("hf_overrides") or {}
    return arguments | {"load_format": _FORMAT, "hf_overrides": {**given, **overrides}}


def _register() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader(_FORMAT)
    class PlainModelLoader(DefaultModelLoader):
        """vLLM's own loader, given the weights that the quantised ones of a folder stand for."""

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
            """Yield every tensor by its name in a plain folder: quantised ones in the engine's
            dtype, others in their own."""
            return _plain_tensors(model_config.model, dtype=model_config.dtype)


def _plain_tensors(path: str, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    reader = CheckpointReader(model_folder(path))
    for name in sorted(reader.names()):
        shape = reader.shape(name)
        tensor = reader.read(name, start=(0,) * len(shape), shape=shape)
        yield name, tensor.to(dtype) if reader.is_quantised(name) else tensor
