"""Shapes of well-known models that come along, for sizes without a network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spmdrl.config import Config

SHAPES = Path(__file__).with_name("shapes")
"""Folders with the config.json of well-known models."""
_SHAPE_OF = {
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-1.7B-Base": "qwen3-1.7b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B-Base": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "models/DeepSeek-V3-Base-bf16": "deepseek-v3",
}


def with_known_shape(cfg: Config) -> Config:
    """Return a config whose model is a shape that comes along, where it names one by its hub name
    and has no folder of it: sizes need no network."""
    path = cfg.model.path
    if path not in _SHAPE_OF or Path(path).is_dir():
        return cfg
    return replace(cfg, model=replace(cfg.model, path=str(SHAPES / _SHAPE_OF[path])))
