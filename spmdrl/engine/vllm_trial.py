"""Whether vLLM can run a model, asked before anything else is built: what it cannot is refused.

Serves vLLM 0.24 to 0.33. Per line: the name here, vLLM's own, and when it can go.

refusing_models     ModelRegistry.models            once vLLM says why it cannot load a module
try_engine          LLMEngine.add_request, step     once it says what its CPU build cannot compute
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.imports import versions
from spmdrl.model.load import hf_config_of
from spmdrl.world.lost_peers.watch import first_line

_TOKENS = range(3, 12)
_SHOWN = 400  # characters of what vLLM says


@contextlib.contextmanager
def refusing_models(cfg: Config) -> Iterator[None]:
    """Turn what vLLM raises of a model into a Refusal that names the model and says what to do.

    Memory that is short is raised as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any library and kind
        config = hf_config_of(cfg.model)
        why = _why(error, config.architectures or ())
        hint = (
            "set engine.dtype to bfloat16, or engine.kind to transformers"
            if "bf16" in why.lower() and cfg.engine.dtype != "bfloat16"
            else "set engine.kind to transformers, which runs every model that is trained here"
        )
        options = f" with engine.options {dict(cfg.engine.options)}" if cfg.engine.options else ""
        raise Refusal(
            f"engine.kind: vllm, and vLLM {versions().get('vllm', 'of an unknown version')} cannot "
            f"run {cfg.model.path} "
            f"({config.model_type}) in {cfg.engine.dtype} here{options}: {why}; {hint}"
        ) from error


def try_engine(llm: Any, *, params: Any) -> None:
    """Score and continue a few tokens: kernels that a build lacks are missed when they run.

    Args:
        params: of a request that scores its prompt and draws a token or more.
    Raises: whatever a kernel, or one that is not there, does.
    """
    llm.add_request("trial", {"prompt_token_ids": [*_TOKENS]}, params)
    while llm.has_unfinished_requests():
        llm.step()
    llm.reset_prefix_cache()


def _why(error: Exception, architectures: Sequence[str]) -> str:
    """Return what went wrong, in one line."""
    if "failed to be inspected" in str(error):
        from vllm import ModelRegistry

        for name in architectures:
            try:
                ModelRegistry.models[name].load_model_cls()
            except Exception as cause:  # of imports
                return f"its module for {name} cannot be imported ({first_line(cause)})"
    lines = [line.strip() for line in str(error).splitlines() if "further information" not in line]
    said = " ".join(lines).partition(" [type=")[0][:_SHOWN]
    return f"{type(error).__name__}: {said or '(no text)'} at {_place(error)}"


def _place(error: Exception) -> str:
    """Return file and line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    return f"{frames[-1].filename.rpartition('site-packages/')[2]}:{frames[-1].lineno}"
