"""Whether settings of adapters and memory are right by themselves."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from spmdrl.config.fields import Config
from spmdrl.imports import attempt

MAX_RANK = 512
"""Of vLLM's adapters."""


def model_problems(cfg: Config) -> list[str]:
    """Return what is wrong with the section `model`, each as `field: what, value seen`."""
    return [*_memory_problems(cfg), *_lora_problems(cfg), *_push_problems(cfg)]


def _memory_problems(cfg: Config) -> Iterator[str]:
    memory = cfg.model.memory
    if memory.optimizer_dtype == "int8" and importlib.util.find_spec("torchao") is None:
        yield (
            "model.memory.optimizer_dtype: int8 takes its quantisation from torchao, "
            "which is not installed: pip install --no-deps torchao==0.18.0"
        )


def _lora_problems(cfg: Config) -> Iterator[str]:
    lora = cfg.model.lora
    pattern = lora.targets if isinstance(lora.targets, str) else ""
    _, error = attempt(lambda: re.compile(pattern), re.error)
    if error or not lora.targets or not all(lora.targets):
        yield (
            "model.lora.targets: expected all-linear, a regular expression of module names, or a "
            f"list of names or their ends, got {lora.targets!r}"
        )


def _push_problems(cfg: Config) -> Iterator[str]:
    lora = cfg.model.lora
    if lora.pushes_adapter and lora.rank > MAX_RANK:
        yield (
            f"model.lora.push: adapter with rank {lora.rank}: vLLM has adapters up to rank "
            f"{MAX_RANK}; take merged"
        )
