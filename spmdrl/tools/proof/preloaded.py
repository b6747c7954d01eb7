"""Slow imports, done once for all ranks of a proof.

multiprocessing's fork server imports this module (`ranks.py`) and nothing else. The ranks are forks
of it.
"""

# ruff: noqa: E402, F401

from __future__ import annotations

import contextlib
import gc
import os
from unittest import mock

gc.disable()  # what is imported stays, so that looking for garbage finds none

# The order matters. This import loads dynamo while TORCHDYNAMO_DISABLE is not set, because a rank's
# model may be compiled.
import transformers.models.auto.modeling_auto

# vLLM's helpers are loaded while it is set, as in engine/vllm/engine.py.
with (
    mock.patch.dict(
        os.environ, TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
    ),
    contextlib.suppress(ImportError),
):
    import vllm.model_executor.models.transformers
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker

# What train.py imports on its way to the end of a run.
import matplotlib.backends.backend_agg
import matplotlib.figure
import pyarrow.compute
import torch.distributed.checkpoint
import tyro

# Else each collection in each rank would visit a million objects: 0.3 s, and it would copy the
# pages that the ranks share. An engine's start alone asks for five.
gc.freeze()
gc.enable()
