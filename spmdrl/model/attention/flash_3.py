"""FlashAttention 3 in place of 2 for torch's varlen kernel, where it is installed on Hopper.

torch 2.13 can put it in the place of its own kernel, for the whole process. FlashAttention 3 has a
flag for a deterministic backward pass, and torch sets it. But releases of 2025 ignore the flag, and
nothing tells their version. So deterministic runs keep FlashAttention 2.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

from spmdrl.imports import attempt
from spmdrl.world.torch_internals import use_flash_3

log = logging.getLogger(__name__)

_MODULE = "flash_attn_interface"
_HOPPER = (9, 0)


@cache
def choose_flash(device: torch.device, *, deterministic: bool) -> None:
    """Use FlashAttention 3 from now on if it can be used; log which one is used.

    Args:
        device: a GPU, on which attention is computed by torch's varlen kernel.
        deterministic: see Config.
    """
    why = _obstacle(device, deterministic=deterministic)
    if not why:
        _, error = attempt(use_flash_3, (AttributeError, ImportError, OSError, RuntimeError))
        if error:
            why = f"{_MODULE} cannot be used by torch {torch.__version__}: {error}"
    log.info("attention: FlashAttention %s", f"2, since {why}" if why else 3)


def _obstacle(device: torch.device, *, deterministic: bool) -> str:
    """Return why FlashAttention 3 cannot be used; empty if nothing is known against it."""
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return "3 needs compute capability 9.0 (Hopper)"
    if find_spec(_MODULE) is None:
        return f"3 is not installed (module {_MODULE})"
    if deterministic:
        return "`deterministic` is true, which some releases of 3 ignore"
    return ""
