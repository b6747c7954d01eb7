"""Which tokens each layer's attention may attend to, found from the masks that a model asks for.

transformers' models ask for masks: causal, with a sliding window, or in chunks. Here a model's base
runs once with stand-ins for all modules that compute. The stand-ins of blocks record their inputs,
and those of masks are `MaskPattern` objects. No weight is read.
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
PLACEHOLDER_MASKS = "spmdrl_placeholder_masks"
"""The attention implementation under which models make a tensor of one element for each mask."""
TRIAL_TOKENS = 5  # of the sequence on which the model runs


@dataclass(frozen=True)
class MaskPattern:
    """Which tokens of its sequence a token attends to: by default itself and all before it."""

    window: int | None = None
    """Only the last `window` tokens, itself included."""
    chunk: int | None = None
    """Only tokens of its own chunk: the sequence is cut into chunks of `chunk` tokens."""
    dtype: torch.dtype | None = None
    """The dtype that the model casts its mask to; None if it does not."""

    def to(self, dtype: torch.dtype) -> MaskPattern:
        """Return the same pattern with the dtype to which the model casts its mask."""
        return replace(self, dtype=dtype)


def mask_pattern_of(module: nn.Module) -> MaskPattern:
    """Return the pattern that `enable_packing` gave to an attention module."""
    pattern = module.mask_pattern
    assert isinstance(pattern, MaskPattern)
    return pattern


class UnknownMask(Exception):
    """A mask that is neither causal, a sliding window nor chunked."""


def block_inputs(hf_model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the inputs of each block when the model computes one sequence.

    Args:
        hf_model: with a base model, on any device; it is not changed.
    Returns: {block: {parameter of its forward: value}}, masks as `MaskPattern`.
    Raises: UnknownMask, and whatever the model's code raises when its parts return zeros.
    """
    try:
        return _inputs(hf_model, others=0)
    except ValueError as error:  # the model unpacks a block's output
        wanted = re.search(r"not enough values to unpack \(expected (\d+), got 1\)", str(error))
        if not wanted:
            raise
        return _inputs(hf_model, others=int(wanted[1]) - 1)


def _inputs(hf_model: nn.Module, *, others: int) -> dict[str, dict[str, Any]]:
    """Do what `block_inputs` does, with blocks that return hidden states and `others` values."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NOTED, _never)
    AttentionMaskInterface.register(_NOTED, _pattern_of)
    found: dict[str, dict[str, Any]] = {}
    own = {module: name for name, module in blocks(hf_model).items()}
    _, base = base_of(hf_model)
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
        tokens = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int64)
        at = torch.arange(TRIAL_TOKENS)[None]
        with torch.no_grad():
            # `packing` is not used; it shows to which blocks the model passes it.
            base(input_ids=tokens, position_ids=at, attention_mask=None, use_cache=False, packing=0)
    return found


def register_placeholder_masks() -> None:
    """Make PLACEHOLDER_MASKS known to transformers."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(PLACEHOLDER_MASKS, _placeholder_mask)


def _placeholder_mask(**_: object) -> Tensor:
    return torch.zeros(1, 1, 1, 1)


def _never(*_: object, **__: object) -> None:
    raise AssertionError("no block computes here")


def _outside(module: nn.Module, own: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """Yield the outermost modules that hold no block."""
    for child in module.children():
        if child in own:
            continue
        if any(part in own for part in child.modules()):
            yield from _outside(child, own)
        else:
            yield from child if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else (child,)


def _stand_in(module: nn.Module) -> Callable[..., Any]:
    """Return a forward that returns zeros of the right shape and uses no weights."""
    width = getattr(module, "embedding_dim", None)  # of an nn.Embedding, or of computed positions
    if isinstance(width, int):
        return lambda ids, *_, **__: torch.zeros(*ids.shape, width)
    if isinstance(module, nn.Linear):
        return lambda x, *_, **__: torch.zeros(*x.shape[:-1], module.out_features)
    if "Rotary" in type(module).__name__:
        return lambda *_, **__: None  # only blocks use it
    return _first


def _first(*args: Any, **kwargs: Any) -> Any:
    """Return the first tensor among the arguments."""
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
        # bound.args[0] is the block.
        hidden = bound.args[1] if len(bound.args) > 1 else next(iter(kwargs.values()))
        output = hidden.as_subclass(_Output)
        return (output, *(Other() for _ in range(others))) if others else output

    return forward


class Other:
    """Stands for what a block returns after its hidden states."""


class _Output(Tensor):
    """Hidden states, for models that use a block's output as it is and for those that index it."""

    def __getitem__(self, key: Any) -> Any:
        """Return the whole tensor for index 0."""
        return self if isinstance(key, int) and key == 0 else super().__getitem__(key)


def _pattern_of(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: object
) -> MaskPattern:
    """Return the pattern of the mask that transformers is asked to make."""
    if local_size is None:
        local_size = TRIAL_TOKENS
        patterns = [MaskPattern()]
    else:
        patterns = [MaskPattern(window=local_size), MaskPattern(chunk=local_size)]
    at = torch.arange(3 * local_size + 1)
    zero = torch.zeros((), dtype=torch.int64)
    # Both sides of the chunks' borders: a window and a chunk differ at a chunk's first query.
    queries = at[[0, local_size - 1, local_size, 2 * local_size - 1, 2 * local_size, -1]]
    seen = mask_function(zero, zero, queries[:, None], at[None])
    for pattern in patterns:
        if torch.equal(seen.expand(len(queries), len(at)), visible(queries, at, pattern)):
            return pattern
    raise UnknownMask("it asks for a mask that is neither causal, a window nor chunks")


def visible(queries: Tensor, keys: Tensor, pattern: MaskPattern) -> Tensor:
    """Return [Q, K] bool: which keys each query attends to, by their positions in the sequence."""
    queries = queries[:, None]
    keys = keys[None]
    seen = keys <= queries
    if pattern.window is not None:
        seen = seen & (keys > queries - pattern.window)
    if pattern.chunk is not None:
        seen = seen & (keys // pattern.chunk == queries // pattern.chunk)
    return seen
