"""Slow imports, done once for all ranks of a proof.

multiprocessing's fork server imports this module (`ranks.py`) and nothing else. The ranks are forks
of it.
"""

from __future__ import annotations

import contextlib
import os
from unittest import mock

# The order matters. This import loads dynamo while TORCHDYNAMO_DISABLE is not set, because a rank's
# model may be compiled.
import transformers.models.auto.modeling_auto  # noqa: F401

# vLLM's helpers are loaded while it is set, as in engine/vllm/engine.py.
with (
    mock.patch.dict(
        os.environ, TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
    ),
    contextlib.suppress(ImportError),
):
    import vllm.v1.engine.llm_engine  # noqa: F401
