"""How the layers of a model keep apart the sequences that are packed into one row.

Attention that asks transformers' interface gets ours, which knows where sequences begin; what each
layer's sees besides is found by mask_patterns.py. Other layers that mix tokens (state-space models,
short convolutions, linear attention, attention by code of its own) know nothing of packing: they
compute one sequence per row, padded after its end, where causal layers do not look. What is
neither is refused by name.

A `packing` goes down to the layers as a keyword argument. Where a model, or one of its layers, does
not hand it on, hooks do.
"""

from __future__ import annotations

import ast
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.attention.kernels import CHOOSING, Temperature
from spmdrl.model.attention.mask_patterns import (
    PLACES,
    SHOWN_TOKENS,
    Other,
    Span,
    UnknownMask,
    block_inputs,
    register_places,
    visible,
)
from spmdrl.model.attention.packing import Packing, pad, unpad
from spmdrl.model.blocks import base_of, blocks
from spmdrl.model.transformers_internals import attention_implementation
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.torch_internals import tree_leaves, tree_map

_MIXES = {
    "attention_mask",
    "past_key_values",
    "past_key_value",
    "past_key_values_length",
    "layer_past",
    "cache_params",
}
"""Parameters that a module has if what it gives of a token depends on the tokens before it, or on
how many these are."""


@dataclass(frozen=True)
class OwnAttention:
    """What attention by code of its own is given beside hidden states."""

    span: Span
    """What its mask shows."""
    biases: tuple[str, ...] = ()
    """Parameters that take what is added to the scores of keys by their place, [Hq, 1, T], 0 at
    the first (ALiBi)."""

    def mask(self, length: int, *, like: Tensor) -> Tensor:
        """Return [1, 1, length, length], as transformers makes masks for eager attention: 0 where
        a key is seen and the dtype's least number where it is not, in the dtype that the model
        casts it to.

        Args:
            like: of the dtype and device.
        """
        at = torch.arange(length, device=like.device)
        least = torch.finfo(like.dtype).min
        mask = like.new_zeros(length, length).masked_fill(~visible(at, at, self.span), least)
        return mask.to(self.span.dtype or like.dtype)[None, None]


@dataclass
class PackingSupport:
    """What keeps sequences apart in a model."""

    spans: dict[str, Span] = field(default_factory=dict)
    """{attention that asks the interface: what it sees}."""
    mixers: dict[str, list[str]] = field(default_factory=dict)
    """{block: its modules that compute one sequence per row}."""
    reasons: list[str] = field(default_factory=list)
    """Why the model cannot be served; empty if it can."""
    temperatures: dict[str, Temperature] = field(default_factory=dict)
    """{attention that scales queries by their place in the row: how}."""
    own_attention: dict[str, OwnAttention] = field(default_factory=dict)
    """{module of `mixers` that attends by code of its own: what it is to be given}."""
    untold: list[str] = field(default_factory=list)
    """Blocks that the model does not hand the packing to."""
    unhanded: dict[str, list[str]] = field(default_factory=dict)
    """{block: attention in it that asks the interface, which the block hands no packing to}."""

    @property
    def chunk(self) -> int | None:
        """Return the tokens of the chunks that some layers attend within; None without any."""
        return next((span.chunk for span in self.spans.values() if span.chunk), None)


def packing_support(hf_model: nn.Module) -> PackingSupport:
    """Read off a model how its layers keep packed sequences apart.

    Args:
        hf_model: on any device; nothing of it is computed, and a model of the hub's own code is
            read alike.
    """
    found = PackingSupport()
    try:
        given = block_inputs(hf_model)
    except UnknownMask as error:
        return PackingSupport(reasons=[str(error)])
    except Exception as error:  # of the model's own code, which may do anything
        return PackingSupport(reasons=[_why_not_followed(error)])
    for name, block in blocks(hf_model).items():
        found.reasons += _read_block(name, block, given[name], found)
    found.reasons += _outside_of_blocks(hf_model)
    if len({span.chunk for span in found.spans.values() if span.chunk}) > 1:
        found.reasons.append("its layers attend within chunks of several sizes")
    return found


def _why_not_followed(error: Exception) -> str:
    """Return why what a model's layers see was not found, when its code ran into an error."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Span):
        return (
            f"its code computes with the causal mask (.{error.name}) before its layers get it, and "
            "what they see then is not known"
        )
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        "what its layers see cannot be found: its code does not run without its weights "
        f"({Path(where.filename).name}:{where.lineno}: {first_line(error)})"
    )


def enable_packing(hf_model: nn.Module) -> PackingSupport:
    """Have the layers of a model keep packed sequences apart, and say how.

    Its blocks are to be given `packing`, or `work` that has one.

    Raises: Refusal for a model that cannot be served.
    """
    found = packing_support(hf_model)
    if found.reasons:
        raise Refusal(f"model: {type(hf_model).__name__} is not served: {found.reasons[0]}")
    for name, span in found.spans.items():
        hf_model.get_submodule(name).span = span  # type: ignore[assignment]
    for name, temperature in found.temperatures.items():
        attention: Any = hf_model.get_submodule(name)
        attention.attn_temperature_tuning = False
        attention.temperature = temperature
    for name in [part for own in found.mixers.values() for part in own]:
        mixer = hf_model.get_submodule(name)
        attention = found.own_attention.get(name)
        mixer.forward = partial(  # type: ignore[assignment]
            _by_rows, mixer, mixer.forward, attention=attention
        )
    for name in [part for own in found.unhanded.values() for part in own]:
        hf_model.get_submodule(name).register_forward_pre_hook(_hand_over, with_kwargs=True)
    for name, block in blocks(hf_model).items():
        told = [*found.mixers.get(name, ()), *found.unhanded.get(name, ())]
        if told or name in found.untold:
            modules = [hf_model.get_submodule(part) for part in told]
            # At each call of the block, so that a recomputation has the packing of its own row.
            block.register_forward_pre_hook(partial(_tell, modules), with_kwargs=True)
    base_name, base = base_of(hf_model)
    if found.untold:
        names = [name.removeprefix(f"{base_name}.") for name in found.untold]
        base.register_forward_pre_hook(_ToBlocks(names), with_kwargs=True)
    if found.own_attention and not found.spans:
        register_places()
        base.forward = partial(  # type: ignore[assignment]
            _with_places_of_masks, hf_model, base.forward
        )
    return found


# --------------------------------------------------------------------------- reading


def _read_block(
    name: str, block: nn.Module, given: Mapping[str, Any], found: PackingSupport
) -> Iterator[str]:
    span = given.get("attention_mask")
    asking, mixing = _parts(block)
    if isinstance(span, Span) and not asking and not mixing:
        own = ", ".join(type(child).__name__ for child in block.children())
        yield f"{name} ({own}) attends by code of its own, which is not a module"
    others = tree_leaves({k: v for k, v in given.items() if k != "attention_mask"})
    if not isinstance(span, Span | None) or any(isinstance(other, Span) for other in others):
        yield f"{name} is given masks otherwise than as attention_mask"
    if handed := [k for k, v in given.items() if any(isinstance(x, Other) for x in tree_leaves(v))]:
        yield f"{name} is given more by the block before it than hidden states: {handed[0]}"
    if "packing" not in given:
        found.untold.append(name)
        if not asking and not mixing:
            own = ", ".join(type(child).__name__ for child in block.children())
            yield f"{name} ({own}) has no part that is known to mix tokens"
    for part in asking:
        attention = block.get_submodule(part)
        if not _hands_on(attention):
            yield f"{name}.{part} does not hand on to its attention where sequences begin"
        if not _hands_on(block):
            found.unhanded.setdefault(name, []).append(f"{name}.{part}")
        found.spans[f"{name}.{part}"] = span if isinstance(span, Span) else Span()
        yield from _attention_problems(f"{name}.{part}", attention, found)
    for part in mixing:
        found.mixers.setdefault(name, []).append(f"{name}.{part}")
        if isinstance(span, Span) and not asking:
            found.own_attention[f"{name}.{part}"] = OwnAttention(span, _biases(given))
            yield from _own_problems(f"{name}.{part}", block.get_submodule(part), given)
    for part, module in block.named_modules():
        if isinstance(module, nn.Conv1d) and not _is_within(part, mixing):
            yield f"{name}.{part} is a convolution over the tokens of the row"


def _outside_of_blocks(hf_model: nn.Module) -> Iterator[str]:
    """Yield what mixes tokens in a base and is in none of its blocks."""
    own = set(blocks(hf_model).values())
    inside = {module for block in own for module in block.modules()}
    base_name, base = base_of(hf_model)
    for name, module in base.named_modules():
        holds_blocks = any(part in own for part in module.modules())
        if (
            module not in inside
            and not holds_blocks
            and not _looks_up_positions(module)
            and (_mixes(module) or _asks_interface(module))
        ):
            yield f"{base_name}.{name} ({type(module).__name__}) mixes tokens outside of its layers"


def _biases(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which of a block's inputs are biases of keys by their place in the row: [Hq, 1, T],
    0 at the first, each next one as much more."""
    found = []
    for name, value in given.items():
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[1:] == (1, SHOWN_TOKENS):
            steps = value.double().diff(dim=-1)
            if not value[..., 0].any() and torch.allclose(steps, steps[..., :1], rtol=0.02):
                found.append(name)
    return tuple(found)


def _own_problems(name: str, module: nn.Module, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield why attention by code of its own cannot compute one sequence per row."""
    if "attention_mask" not in inspect.signature(type(module).forward).parameters:
        yield f"{name} attends by code of its own, without an attention_mask"
    known = _biases(given)
    for key, value in given.items():
        if not isinstance(value, Tensor) or key in known:
            continue
        is_of_tokens = value.shape[:2] == (1, SHOWN_TOKENS)
        if SHOWN_TOKENS in value.shape and not is_of_tokens:
            yield f"{name} is given {key} {list(value.shape)}, by the place of tokens in the row"


def _parts(block: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the attention modules in a block that ask the interface, and those of its
    topmost other modules that mix tokens."""
    asking = [name for name, part in block.named_modules() if name and _asks_interface(part)]
    mixing: list[str] = []
    for name, part in block.named_modules():
        is_known = not name or _is_within(name, [*asking, *mixing])
        if not is_known and _mixes(part) and not any(_is_within(a, [name]) for a in asking):
            mixing.append(name)
    return asking, mixing


def _is_within(name: str, others: list[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _looks_up_positions(module: nn.Module) -> bool:
    """Return whether a module is an embedding of positions that it is given; OPT's takes the mask
    to count them where it is given none."""
    parameters = inspect.signature(type(module).forward).parameters
    return isinstance(module, nn.Embedding) and {"attention_mask", "position_ids"} <= {*parameters}


def _mixes(module: nn.Module) -> bool:
    is_told = bool(_MIXES & set(inspect.signature(type(module).forward).parameters))
    return is_told or any(isinstance(child, nn.Conv1d) for child in module.children())


def _attention_problems(name: str, module: nn.Module, found: PackingSupport) -> Iterator[str]:
    if "torch.arange" in _code(type(module).forward):
        # Llama 4's, by their place in the row. It is the last thing that they go through.
        if not hasattr(module, "attn_temperature_tuning"):
            yield f"{name} counts the places of tokens by the row, not by their sequence"
        elif module.attn_temperature_tuning and not module.use_rope:
            found.temperatures[name] = Temperature(module.floor_scale, module.attn_scale)
    for part, child in module.named_modules():
        if part and _mixes(child):
            yield f"{name}.{part} ({type(child).__name__}) chooses keys by code of its own"
    yield from (f"{name} attends {what}" for what in _left_out(type(module).forward))
    if not getattr(module, "is_causal", True):
        yield f"{name} attends in both directions"


@cache
def _left_out(forward: Any) -> tuple[str, ...]:
    """Return what an attention module's call of the interface asks for and ours would not do."""
    found = []
    for call in ast.walk(ast.parse(dedent(_code(forward)))):
        options = {k.arg: k.value for k in call.keywords} if isinstance(call, ast.Call) else {}
        if not {"scaling", "dropout"} & options.keys():
            continue
        found += [f"by its {name}" for name in CHOOSING if name in options]
        places = call.args[4:5] if isinstance(call, ast.Call) else []
        mask = options.get("attention_mask", places[0] if places else None)
        if mask is not None and ast.unparse(mask) not in ("attention_mask", "None"):
            found.append(f"by a mask of its own, {ast.unparse(mask)}")
    return tuple(found)


def _hands_on(module: nn.Module) -> bool:
    """Return whether a module takes further keyword arguments, and names them once more."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    others = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    return bool(others) and _code(type(module).forward).count(f"**{others[0]}") > 1


def _asks_interface(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _code(type(module).forward)


@cache
def _code(forward: Any) -> str:
    """Return the source of a module's forward; empty where there is none to read, which then counts
    for no attention."""
    with suppress(OSError, TypeError):
        return inspect.getsource(forward)
    return ""


# --------------------------------------------------------------------------- computing


_TOLD = ("packing", "work")
"""Arguments that say where sequences begin: the trainer's, the transformers engine's."""


class _ToBlocks:
    """Hands to blocks what the base is told, where the model's own code does not.

    Args:
        names: of the blocks, within the base.
    """

    def __init__(self, names: list[str]):
        self._names = names
        self._told: dict[str, Any] = {}
        self._is_on = False

    def __call__(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Take what the base is told, before it runs."""
        told = {name: kwargs[name] for name in _TOLD if name in kwargs}
        # Blocks are wrapped after this was made. Outermost, what is told is among the arguments
        # that a recomputation gets again. Before the first row there are calls that tell nothing.
        if told and not self._is_on:
            for name in self._names:
                block = base.get_submodule(name)
                block.register_forward_pre_hook(self._add, with_kwargs=True, prepend=True)
            self._is_on = True
        self._told = told
        return args, _accepted(base, kwargs)

    def _add(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, **self._told}


def _accepted(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments without what is told, where a module takes no further ones."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return kwargs
    return {name: value for name, value in kwargs.items() if name not in _TOLD}


def _tell(modules: list[nn.Module], block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    for module in modules:
        module.told = {name: kwargs[name] for name in _TOLD if name in kwargs}
    return args, _accepted(block, kwargs)


def _hand_over(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, **attention.told}


def _with_places_of_masks(
    hf_model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a base whose attention modules make their masks by `_by_rows`: some bases compute with
    masks before that, which are to be something."""
    with attention_implementation(hf_model, PLACES):
        return forward(*args, **kwargs)


def _by_rows(
    mixer: nn.Module,
    forward: Callable[..., Any],
    hidden_states: Tensor,
    *args: Any,
    attention: OwnAttention | None,
    **kwargs: Any,
) -> Any:
    """Compute a layer one sequence per row: [1, T, H] of [1, T, H].

    Sequences of similar length go together, [B, L, H], each padded by its own last token; layers
    are causal, so no token sees what comes behind it.

    Args:
        forward: the layer's own.
        attention: what it is given if it attends by code of its own; then with biases of keys
            sequences are computed one by one, since models differ in how such biases are batched.
        args, kwargs: others of its arguments; tensors [1, T, ...] are cut alike, and what tells of
            packing, which it does not know, stays out.
    """
    told = mixer.told
    packing = told["packing"] if "packing" in told else told["work"].packing
    assert isinstance(packing, Packing)
    names = [*inspect.signature(type(mixer).forward).parameters][2:]
    kwargs |= dict(zip(names, args))
    kwargs = {k: v for k, v in kwargs.items() if k not in _TOLD}
    length = hidden_states.shape[1]

    def padded_rows(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, length)
        return pad(value[0], packing) if is_of_tokens else value

    biases = {name: kwargs.pop(name) for name in (attention.biases if attention else ())}
    whole = padded_rows(hidden_states)
    others = tree_map(padded_rows, kwargs)
    padded = whole.shape[0]
    outputs = []
    for start, count, rows in _alike_rows(packing, one_by_one=bool(biases)):
        end = start + count * rows

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape[:1] != (padded,):
                return value
            return value[start:end].unflatten(0, (count, rows))

        own = tree_map(cut, others) | {name: bias[..., :rows] for name, bias in biases.items()}
        if attention:
            own["attention_mask"] = attention.mask(rows, like=hidden_states)
        outputs.append(forward(cut(whole), **own))
    is_several = isinstance(outputs[-1], (tuple, list))
    firsts = [output[0] if is_several else output for output in outputs]
    joined = unpad(torch.cat([first.flatten(0, 1) for first in firsts]), packing)[None]
    return type(outputs[-1])((joined, *outputs[-1][1:])) if is_several else joined


def _alike_rows(packing: Packing, *, one_by_one: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first padded row, sequences, tokens of each) of what is computed at once."""
    for group in packing.groups:
        if one_by_one:
            for at in range(group.count):
                yield group.start + at * group.length, 1, group.length
        else:
            yield group.start, group.count, group.length
