"""Import what ranks import slowly, once for all ranks of a proof.

`ranks.py` names this module to multiprocessing's fork server, so that ranks are forks of a process
that has done these imports and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from unittest import mock

# In this order: dynamo reads the variable below here, where a rank's model may be compiled ...
import transformers.models.auto.modeling_auto  # noqa: F401

# ... and vLLM's own helpers here, as engine/vllm/engine.py has it.
with (
    mock.patch.dict(
        os.environ, TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
    ),
    contextlib.suppress(ImportError),
):
    import vllm.v1.engine.llm_engine  # noqa: F401
