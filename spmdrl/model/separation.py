"""Whether sequences packed into one row are kept apart by every layer of a model.

They are apart in attention that goes through transformers' interface, since ours is behind it. What
else lets a token see others, and what a model says in the mask argument alone, knows nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from torch import nn

from spmdrl.model.blocks import blocks

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def leaks(hf_model: nn.Module) -> str:
    """Return why packed sequences would not be computed as single ones are; empty if they are.

    Read off the layers' own code, without a forward pass. A model of the hub's own code is read
    alike.
    """
    return next(_leaks(hf_model), "")


def _leaks(hf_model: nn.Module) -> Iterator[str]:
    config = hf_model.config.get_text_config()
    for name, block in blocks(hf_model).items():
        parts = [*block.modules()]
        attention = [part for part in parts if _asks_interface(part)]
        convolutions = [n for n, part in block.named_modules() if isinstance(part, nn.Conv1d)]
        if convolutions:
            yield f"{name}.{convolutions[0]} is a convolution over the tokens of the row"
        if not attention:
            mixers = ", ".join(type(child).__name__ for child in block.children())
            yield f"{name} ({mixers}) does not attend by transformers' attention interface"
    kinds = {*(getattr(config, "layer_types", None) or ())} - _KNOWN_LAYERS
    if kinds:
        yield f"its layer_types name {', '.join(sorted(kinds))}"
    if _has_window(config) and not any(_takes_window(part) for part in hf_model.modules()):
        yield (
            f"its sliding_window of {config.sliding_window} stands in the mask argument alone, "
            "not in what its attention is given"
        )


def _asks_interface(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _code(type(module).forward)


def _takes_window(module: nn.Module) -> bool:
    return _asks_interface(module) and "sliding_window" in _code(type(module).forward)


@cache
def _code(forward: Any) -> str:
    """Return the source of a module's forward; empty where there is none to read, which then counts
    for no attention."""
    with suppress(OSError, TypeError):
        return inspect.getsource(forward)
    return ""


def _has_window(config: object) -> bool:
    window = getattr(config, "sliding_window", None)
    return bool(window) and getattr(config, "use_sliding_window", True) is not False
