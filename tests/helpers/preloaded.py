"""What ranks of tests import, and what vLLM does in each of them, done once for all.

The fork server of `helpers/ranks.py` imports this. On one core it saves 0.4 of the 0.65 s of a
small trainer, and 1.9 of the 2.4 s of a small engine of vLLM.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
from typing import Any
from unittest import mock

import spmdrl
import spmdrl.tools.proof.preloaded

gc.disable()

_LEFT_OUT = ("spmdrl.__main__", "spmdrl.tools", "spmdrl.model.logit_kernels")
"""Programs, and what needs Triton."""
_HELPERS = ("built", "comparing", "meshes", "policy_runs", "ragged", "ranks", "runs", "worlds")
_FAMILIES = ("deepseek_v3", "gemma2", "gpt_oss", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def _import_all() -> None:
    for module in pkgutil.walk_packages(spmdrl.__path__, "spmdrl."):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)
    for name in _HELPERS:
        importlib.import_module(f"tests.helpers.{name}")
    for family in _FAMILIES:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _prepare_vllm() -> None:
    """Import what engines import late, and replace Triton's kernels, for which vLLM looks through
    all modules."""
    importlib.import_module("vllm.model_executor.layers.quantization.online.base")
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


_import_all()
with (
    mock.patch.dict(
        os.environ, TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
    ),
    contextlib.suppress(ImportError, AttributeError),  # without vLLM, or with another version
):
    _prepare_vllm()

# A closing engine of vLLM unfreezes all objects and collects garbage, which takes 1 s. Ranks
# collect only their own.
gc.freeze()
real_freeze = gc.freeze
real_unfreeze = gc.unfreeze
gc.freeze = gc.unfreeze = lambda: None
gc.enable()
