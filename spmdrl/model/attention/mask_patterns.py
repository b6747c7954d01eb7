"""What each layer's attention sees, found from the masks that a model's own code asks for.

Transformers' models say windows and chunks in the mask argument, and some a window to attention.
Here a model's base runs once with everything replaced that computes: blocks note what they are
given, and masks are objects that say which tokens see which. No weight is read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.blocks import base_of, blocks, replaced_forward
from spmdrl.model.transformers_internals import attention_implementation
from spmdrl.world.torch_internals import zeros_in

_NOTED = "spmdrl_noted"
PLACES = "spmdrl_places"
"""An attention implementation by whose name models make, for masks, small tensors that stand in
their places."""
SHOWN_TOKENS = 5  # of the sequence that is shown to the model: masks alone depend on them


@dataclass(frozen=True)
class Span:
    """Which tokens of a sequence before it a token sees; all by default."""

    window: int | None = None
    """The last so many, itself included."""
    chunk: int | None = None
    """Those since the last multiple of so many, counted from the sequence's first."""
    dtype: torch.dtype | None = None
    """What the model casts its mask to; None as it was made."""

    def to(self, dtype: torch.dtype) -> Span:
        """Return the same, noting that the model casts its mask."""
        return replace(self, dtype=dtype)


def mask_pattern_of(module: nn.Module) -> Span:
    """Return what attention sees, of a model that packing_support.py has told it."""
    span = module.span
    assert isinstance(span, Span)
    return span


class UnknownMask(Exception):
    """A mask that is neither causal, a sliding window nor chunked."""


def block_inputs(hf_model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what each block is given when the model computes one sequence: {block: {parameter of
    its forward: value}}, masks as `Span`.

    Args:
        hf_model: with a base model, on any device; as it was when this returns.
    Raises: whatever the model's code does when its parts return zeros; UnknownMask.
    """
    try:
        return _inputs(hf_model, others=0)
    except ValueError as error:  # of models that take a block's output for several
        wanted = re.search(r"not enough values to unpack \(expected (\d+), got 1\)", str(error))
        if not wanted:
            raise
        return _inputs(hf_model, others=int(wanted[1]) - 1)


def _inputs(hf_model: nn.Module, *, others: int) -> dict[str, dict[str, Any]]:
    """Return what `block_inputs` does, of blocks that give hidden states and so many others."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NOTED, _never)
    AttentionMaskInterface.register(_NOTED, _span_of)
    found: dict[str, dict[str, Any]] = {}
    own, (_, base) = {m: name for name, m in blocks(hf_model).items()}, base_of(hf_model)
    with ExitStack() as replaced:
        replaced.enter_context(attention_implementation(hf_model, _NOTED))
        for module in base.modules():
            if module not in own and any(part in own for part in module.modules()):
                replaced.enter_context(zeros_in(module))
        for module in _outside(base, own):
            replaced.enter_context(replaced_forward(module, _stand_in(module)))
        for block, name in own.items():
            replaced.enter_context(
                replaced_forward(block, _noting(block, found.setdefault(name, {}), others=others))
            )
        tokens = torch.zeros(1, SHOWN_TOKENS, dtype=torch.int64)
        at = torch.arange(SHOWN_TOKENS)[None]
        with torch.no_grad():
            base(input_ids=tokens, position_ids=at, attention_mask=None, use_cache=False, packing=0)
    return found


def register_places() -> None:
    """Make PLACES known to transformers."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(PLACES, _place)


def _place(**_: object) -> Tensor:
    return torch.zeros(1, 1, 1, 1)


def _never(*_: object, **__: object) -> None:
    raise AssertionError("no block computes here")


def _outside(module: nn.Module, own: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """Yield the modules that hold no block and are called from one that does, or are the base's."""
    for child in module.children():
        if child in own:
            continue
        if any(part in own for part in child.modules()):
            yield from _outside(child, own)
        else:
            yield from child if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else (child,)


def _stand_in(module: nn.Module) -> Callable[..., Any]:
    """Return a forward that gives zeros of the right shape, without weights."""
    if isinstance(module, nn.Embedding):
        return lambda ids, *_, **__: torch.zeros(*ids.shape, module.embedding_dim)
    if isinstance(module, nn.Linear):
        return lambda x, *_, **__: torch.zeros(*x.shape[:-1], module.out_features)
    if "Rotary" in type(module).__name__:
        return lambda *_, **__: None  # for blocks alone
    return _first


def _first(*args: Any, **kwargs: Any) -> Any:
    """Return what a module computes on, by its place or by a name."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def _noting(block: nn.Module, found: dict[str, Any], *, others: int) -> Callable[..., Any]:
    signature = inspect.signature(type(block).forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(block, *args, **kwargs)
        extra = next(
            (n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "kwargs"
        )
        found.update({k: v for k, v in bound.arguments.items() if k != extra})
        found.update(bound.arguments.get(extra, {}))
        hidden = bound.args[1] if len(bound.args) > 1 else next(iter(kwargs.values()))
        output = hidden.as_subclass(_Output)
        return (output, *(Other() for _ in range(others))) if others else output

    return forward


class Other:
    """What a block gives besides hidden states."""


class _Output(Tensor):
    """Hidden states for who takes a block's output as it is, or as the first of several."""

    def __getitem__(self, key: Any) -> Any:
        """Return all of it as the first."""
        return self if isinstance(key, int) and key == 0 else super().__getitem__(key)


def _span_of(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: object
) -> Span:
    """Stand for the making of a mask: say which tokens it lets a token see."""
    if local_size is None:
        local_size = SHOWN_TOKENS
        forms = [Span()]
    else:
        forms = [Span(window=local_size), Span(chunk=local_size)]
    at = torch.arange(3 * local_size + 1)
    zero = torch.zeros((), dtype=torch.int64)
    queries = at[[0, local_size - 1, local_size, 2 * local_size - 1, 2 * local_size, -1]]
    seen = mask_function(zero, zero, queries[:, None], at[None])
    for form in forms:
        if torch.equal(seen.expand(len(queries), len(at)), visible(queries, at, form)):
            return form
    raise UnknownMask("it asks for a mask that is neither causal, a window nor chunks")


def visible(queries: Tensor, keys: Tensor, span: Span) -> Tensor:
    """Return [Q, K] bool: which keys, by their place in the sequence, each query sees."""
    queries = queries[:, None]
    keys = keys[None]
    seen = keys <= queries
    if span.window is not None:
        seen = seen & (keys > queries - span.window)
    if span.chunk is not None:
        seen = seen & (keys // span.chunk == queries // span.chunk)
    return seen
