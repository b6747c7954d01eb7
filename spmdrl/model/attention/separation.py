"""How the layers of a model keep apart the sequences that are packed into one row.

Attention that asks transformers' interface gets ours, which knows where sequences begin; what each
layer's sees besides is found by mask_spans.py. Other layers that mix tokens (state-space models,
short convolutions, linear attention) know nothing of packing: they compute one sequence per row,
padded behind its end, where causal layers do not look. What is neither is refused by name.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.attention.kernels import CHOOSING, Temperature
from spmdrl.model.attention.mask_spans import Other, Span, UnknownMask, block_inputs
from spmdrl.model.attention.packing import Packing, pad, unpad
from spmdrl.model.blocks import blocks
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.torch_internals import tree_leaves, tree_map

_MIXES = {"attention_mask", "past_key_values", "past_key_value", "layer_past", "cache_params"}
"""Parameters that a module has if its tokens see others."""


@dataclass
class Separation:
    """What keeps sequences apart in a model."""

    spans: dict[str, Span] = field(default_factory=dict)
    """{attention that asks the interface: what it sees}."""
    mixers: dict[str, list[str]] = field(default_factory=dict)
    """{block: its modules that compute one sequence per row}."""
    reasons: list[str] = field(default_factory=list)
    """Why the model cannot be served; empty if it can."""
    temperatures: dict[str, Temperature] = field(default_factory=dict)
    """{attention that scales queries by their place in the row: how}."""

    @property
    def chunk(self) -> int | None:
        """Return the tokens of the chunks that some layers attend within; None without any."""
        return next((span.chunk for span in self.spans.values() if span.chunk), None)


def separation_of(hf_model: nn.Module) -> Separation:
    """Read off a model how its layers keep packed sequences apart.

    Args:
        hf_model: on any device; nothing of it is computed, and a model of the hub's own code is
            read alike.
    """
    found = Separation()
    try:
        given = block_inputs(hf_model)
    except UnknownMask as error:
        return Separation(reasons=[str(error)])
    except Exception as error:  # of the model's own code, which may do anything
        why = "what its layers see cannot be found, since its code cannot be followed"
        return Separation(reasons=[f"{why} ({first_line(error)})"])
    for name, block in blocks(hf_model).items():
        found.reasons += _read_block(name, block, given[name], found)
    if len({span.chunk for span in found.spans.values() if span.chunk}) > 1:
        found.reasons.append("its layers attend within chunks of several sizes")
    return found


def separate(hf_model: nn.Module) -> Separation:
    """Have the layers of a model keep packed sequences apart, and say how.

    Its blocks are to be given `packing`, or `work` that has one.

    Raises: Refusal for a model that cannot be served.
    """
    found = separation_of(hf_model)
    if found.reasons:
        raise Refusal(f"model: {type(hf_model).__name__} is not served: {found.reasons[0]}")
    for name, span in found.spans.items():
        hf_model.get_submodule(name).span = span  # type: ignore[assignment]
    for name, temperature in found.temperatures.items():
        attention: Any = hf_model.get_submodule(name)
        attention.attn_temperature_tuning, attention.temperature = False, temperature
    for name, own in found.mixers.items():
        mixers = [hf_model.get_submodule(mixer) for mixer in own]
        for mixer in mixers:
            mixer.forward = partial(_by_rows, mixer, mixer.forward)  # type: ignore[assignment]
        # At each call of the block, so that a recomputation has the packing of its own row.
        hf_model.get_submodule(name).register_forward_pre_hook(
            partial(_tell, mixers), with_kwargs=True
        )
    return found


# --------------------------------------------------------------------------- reading


def _read_block(
    name: str, block: nn.Module, given: Mapping[str, Any], found: Separation
) -> Iterator[str]:
    span = given.get("attention_mask")
    is_causal = isinstance(span, Span)
    asking, mixing = _parts(block)
    if is_causal and not asking:
        own = ", ".join(type(child).__name__ for child in block.children())
        yield f"{name} ({own}) does not attend by transformers' attention interface"
    others = tree_leaves({k: v for k, v in given.items() if k != "attention_mask"})
    if not isinstance(span, Span | None) or any(isinstance(other, Span) for other in others):
        yield f"{name} is given masks otherwise than as attention_mask"
    if handed := [k for k, v in given.items() if any(isinstance(x, Other) for x in tree_leaves(v))]:
        yield f"{name} is given more by the block before it than hidden states: {handed[0]}"
    if "packing" not in given:
        yield f"{name} is not told where sequences begin: the model hands no such argument on"
    for part in asking:
        if not all(map(_hands_on, (block, block.get_submodule(part)))):
            yield f"{name} does not hand on to {part} where sequences begin"
        found.spans[f"{name}.{part}"] = span if isinstance(span, Span) else Span()
        yield from _attention_problems(f"{name}.{part}", block.get_submodule(part), found)
    for part in mixing:
        if not is_causal or asking:
            found.mixers.setdefault(name, []).append(f"{name}.{part}")
    for part, module in block.named_modules():
        if isinstance(module, nn.Conv1d) and not _is_within(part, mixing):
            yield f"{name}.{part} is a convolution over the tokens of the row"


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


def _mixes(module: nn.Module) -> bool:
    is_told = bool(_MIXES & set(inspect.signature(type(module).forward).parameters))
    return is_told or any(isinstance(child, nn.Conv1d) for child in module.children())


def _attention_problems(name: str, module: nn.Module, found: Separation) -> Iterator[str]:
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


def _tell(mixers: list[nn.Module], block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    packing = kwargs["packing"] if "packing" in kwargs else kwargs["work"].packing
    for mixer in mixers:
        mixer.packing = packing


def _by_rows(
    mixer: nn.Module, forward: Callable[..., Any], hidden_states: Tensor, **kwargs: Any
) -> Any:
    """Compute a layer one sequence per row: [1, T, H] of [1, T, H].

    Sequences of similar length go together, [B, L, H], each padded by its own last token; layers
    are causal, so no token sees what comes behind it.

    Args:
        forward: the layer's own.
        kwargs: others of its arguments; tensors [1, T, ...] are cut alike, and what tells of
            packing, which it does not know, stays out.
    """
    packing = mixer.packing
    assert isinstance(packing, Packing)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("packing", "work")}
    length = hidden_states.shape[1]

    def padded_rows(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, length)
        return pad(value[0], packing) if is_of_tokens else value

    whole, others = padded_rows(hidden_states), tree_map(padded_rows, kwargs)
    padded = whole.shape[0]
    outputs = []
    for group in packing.groups:
        end = group.start + group.count * group.length

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape[:1] != (padded,):
                return value
            return value[group.start : end].unflatten(0, (group.count, group.length))

        outputs.append(forward(cut(whole), **tree_map(cut, others)))
    firsts = [output[0] if isinstance(output, tuple) else output for output in outputs]
    joined = unpad(torch.cat([first.flatten(0, 1) for first in firsts]), packing)[None]
    return (joined, *outputs[-1][1:]) if isinstance(outputs[-1], tuple) else joined
