"""Gradients of attention that repeat to the last bit on GPUs.

torch's flash and memory-efficient attention have deterministic backward kernels, but use them only
if operations without such kernels raise (warn_only=False). Runs cannot set that for a whole
backward pass: Mamba's layers, for example, need cumsum, which has none. So it is set while the
backward functions of attention run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdrl.model.attention.sinks import FlashWithSinks
from spmdrl.model.parallel.ring_attention import Ring

_NAMES = ("attention", "attn")
"""In lower case, parts of the names of torch's and flash-attn's backward functions of attention."""
_OTHER_NAMES = {
    f"{FlashWithSinks.__name__}Backward",
    f"{Ring.__name__}Backward",
    "CompiledFunctionBackward",  # a compiled block, with its attention
}


def repeat_attention(loss: Tensor) -> None:
    """Have the backward functions of attention in a loss's graph use deterministic kernels.

    This does nothing unless `torch.use_deterministic_algorithms(True, warn_only=True)` is set, and
    on CPUs, whose kernels are deterministic.
    """
    if loss.device.type == "cpu" or not torch.is_deterministic_algorithms_warn_only_enabled():
        return
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _is_attention(node.name()):
            node.register_prehook(_raise)
            node.register_hook(_warn)
        nodes += [before for before, _ in node.next_functions]


def _is_attention(name: str) -> bool:
    return name in _OTHER_NAMES or any(part in name.lower() for part in _NAMES)


def _raise(*_: Any) -> None:
    # Not use_deterministic_algorithms, which changes the settings of torch.compile too.
    torch.set_deterministic_debug_mode("error")


def _warn(*_: Any) -> None:
    torch.set_deterministic_debug_mode("warn")
