"""How the layers of a model keep packed sequences apart.

A row holds several sequences. A layer must not mix tokens of different sequences:

- Attention that goes through transformers' attention interface calls our kernel, which knows where
  sequences begin. A layer's masks say which tokens it may attend to (mask_patterns.py).
- Layers with a state whose functions we replace clear it where a sequence begins, or take the one
  after a shared prefix: gated delta nets, Kimi delta attention, Mamba 1 and 2, RG-LRU, lightning
  attention, short convolutions (state_layers.py).
- Other layers that mix tokens do not know about packing: attention by the model's own code, and
  eager attention to keys that an indexer chooses. They compute one sequence per row, padded at its
  end. They are causal, so no token sees the padding.
- A model with any other layer that mixes tokens is refused by name.

Layers get a `packing` as a keyword argument. Where a model or a block does not pass it on, a hook
does.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
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
    PLACEHOLDER_MASKS,
    TRIAL_TOKENS,
    MaskPattern,
    Other,
    UnknownMask,
    block_inputs,
    register_placeholder_masks,
    visible,
)
from spmdrl.model.attention.packing import Packing, pad, unpad
from spmdrl.model.attention.state_layers import supports_packed_states, with_packed_states
from spmdrl.model.blocks import base_of, blocks
from spmdrl.model.parallel.row_slices import SlicedPacking
from spmdrl.model.parallel.state_exchange import StateRow
from spmdrl.model.transformers_internals import attention_implementation
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.torch_internals import tree_leaves, tree_map

_MIXING_PARAMETERS = {
    "attention_mask",
    "past_key_values",
    "past_key_value",
    "past_key_values_length",
    "layer_past",
    "cache_params",
}
"""Parameters of modules whose output for a token depends on the tokens before it, or on their
number."""


@dataclass(frozen=True)
class OwnAttention:
    """The inputs, other than hidden states, of attention by the model's own code."""

    mask_pattern: MaskPattern
    biases: tuple[str, ...] = ()
    """Parameters for biases of scores by the position of the key, [Hq, 1, T], 0 at the first
    (ALiBi)."""
    is_eager: bool = False
    """Whether it calls transformers' interface, of which it gets the eager attention."""

    def mask(self, length: int, *, like: Tensor) -> Tensor:
        """Return the mask [1, 1, length, length] of one sequence, as for eager attention.

        It is 0 where a key is visible, and the dtype's lowest number where it is not. Its dtype is
        the one that the model casts its masks to.

        Args:
            like: has the dtype and device.
        """
        at = torch.arange(length, device=like.device)
        least = torch.finfo(like.dtype).min
        mask = like.new_zeros(length, length).masked_fill(
            ~visible(at, at, self.mask_pattern), least
        )
        return mask.to(self.mask_pattern.dtype or like.dtype)[None, None]


@dataclass
class PackingSupport:
    """How a model keeps packed sequences apart. All keys are names of modules."""

    mask_patterns: dict[str, MaskPattern] = field(default_factory=dict)
    """{attention that goes through transformers' interface: which tokens it attends to}."""
    mixers: dict[str, list[str]] = field(default_factory=dict)
    """{block: its modules that compute one sequence per row}."""
    states: dict[str, list[str]] = field(default_factory=dict)
    """{block: its modules that keep a state, and clear it where a sequence begins}."""
    reasons: list[str] = field(default_factory=list)
    """Why the model cannot compute packed rows; empty if it can."""
    repeated: list[str] = field(default_factory=list)
    """Attention that calls transformers' interface more than once, with other keys or values each
    time. A cache has those of one call."""
    temperatures: dict[str, Temperature] = field(default_factory=dict)
    """{attention that scales queries by their position: how}."""
    own_attention: dict[str, OwnAttention] = field(default_factory=dict)
    """{module of `mixers` with attention by the model's own code: its inputs but hidden states}."""
    blocks_without_packing: list[str] = field(default_factory=list)
    """Blocks that the model does not pass the packing to."""
    attention_without_packing: dict[str, list[str]] = field(default_factory=dict)
    """{block: attention through the interface that the block does not pass the packing to}."""

    @property
    def chunk(self) -> int | None:
        """Return the length of the chunks that some layers attend within, in tokens; or None."""
        return next((own.chunk for own in self.mask_patterns.values() if own.chunk), None)

    @property
    def unshared(self) -> str:
        """Return why a common prefix cannot be computed once; empty if it can."""
        for name in itertools.chain(*self.mixers.values()):
            return f"{name} computes one sequence per row"
        for name, pattern in self.mask_patterns.items():
            if pattern.chunk is not None:
                return f"{name} attends within chunks of {pattern.chunk} tokens"
        return ""


def packing_support(hf_model: nn.Module) -> PackingSupport:
    """Find out how the layers of a model keep packed sequences apart.

    Args:
        hf_model: on any device; its weights are not used. Code from the hub is read as well.
    """
    found = PackingSupport()
    try:
        inputs = block_inputs(hf_model)
    except UnknownMask as error:
        return PackingSupport(reasons=[str(error)])
    except Exception as error:  # the model's own code may raise anything
        return PackingSupport(reasons=[_why_not_followed(error)])
    for name, block in blocks(hf_model).items():
        found.reasons += _read_block(name, block, inputs[name], found)
    found.reasons += _mixing_outside_blocks(hf_model)
    if len({own.chunk for own in found.mask_patterns.values() if own.chunk}) > 1:
        found.reasons.append("its layers attend within chunks of several sizes")
    return found


def _why_not_followed(error: Exception) -> str:
    """Return why the masks of a model's layers were not found, after its code raised an error."""
    if isinstance(error, AttributeError) and isinstance(error.obj, MaskPattern):
        return (
            f"its code computes with the causal mask (.{error.name}) before its layers get it, so "
            "that the layers' own mask is not known"
        )
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        "the masks of its layers cannot be found: its code does not run without its weights "
        f"({Path(where.filename).name}:{where.lineno}: {first_line(error)})"
    )


def enable_packing(hf_model: nn.Module) -> PackingSupport:
    """Have the layers of a model keep packed sequences apart; return how they do.

    From then on its blocks need `packing` as a keyword argument, or `work`, which has one.

    Raises: Refusal for a model that cannot compute packed rows.
    """
    found = packing_support(hf_model)
    if found.reasons:
        raise Refusal(f"model: {type(hf_model).__name__} is not served: {found.reasons[0]}")
    for name, pattern in found.mask_patterns.items():
        hf_model.get_submodule(name).mask_pattern = pattern  # type: ignore[assignment]
    for name, temperature in found.temperatures.items():
        attention: Any = hf_model.get_submodule(name)
        # The kernel scales the queries instead, by their positions in the sequence.
        attention.attn_temperature_tuning = False
        attention.temperature = temperature
    for name in itertools.chain(*found.mixers.values()):
        mixer = hf_model.get_submodule(name)
        attention = found.own_attention.get(name)
        mixer.forward = partial(  # type: ignore[assignment]
            _by_rows, mixer, mixer.forward, attention=attention
        )
    for name in itertools.chain(*found.states.values()):
        mixer = hf_model.get_submodule(name)
        mixer.forward = partial(  # type: ignore[assignment]
            _in_one_row, with_packed_states(mixer, partial(_stored_row, mixer))
        )
    for name in itertools.chain(*found.attention_without_packing.values()):
        hf_model.get_submodule(name).register_forward_pre_hook(_add_packing, with_kwargs=True)
    for name, block in blocks(hf_model).items():
        parts = [
            *found.mixers.get(name, ()),
            *found.states.get(name, ()),
            *found.attention_without_packing.get(name, ()),
        ]
        if parts or name in found.blocks_without_packing:
            modules = [hf_model.get_submodule(part) for part in parts]
            # At each call of the block, so that a recomputation has the packing of its own row.
            block.register_forward_pre_hook(partial(_store_packing, modules), with_kwargs=True)
    base_name, base = base_of(hf_model)
    if found.blocks_without_packing:
        names = [name.removeprefix(f"{base_name}.") for name in found.blocks_without_packing]
        base.register_forward_pre_hook(_PassToBlocks(names), with_kwargs=True)
    # Attention through the interface needs the implementation that this would replace.
    if found.own_attention and not found.mask_patterns:
        register_placeholder_masks()
        base.forward = partial(  # type: ignore[assignment]
            _with_placeholder_masks, hf_model, base.forward
        )
    return found


# --------------------------------------------------------------------------- reading a model


def _read_block(
    name: str, block: nn.Module, inputs: Mapping[str, Any], found: PackingSupport
) -> Iterator[str]:
    """Note in `found` how a block keeps sequences apart, and yield why it cannot.

    Args:
        inputs: of the block, by parameter; see `block_inputs`.
    """
    mask = inputs.get("attention_mask")
    pattern = mask if isinstance(mask, MaskPattern) else None
    attention_parts, mixing_parts = _mixing_parts(block)
    children = ", ".join(type(child).__name__ for child in block.children())
    mixes = bool(attention_parts or mixing_parts)
    if pattern and not mixes:
        yield f"{name} ({children}) attends by code of its own, which is not a module"
    by_rows = [part for part in attention_parts if _chooses_keys(block.get_submodule(part))]
    others = tree_leaves({k: v for k, v in inputs.items() if k != "attention_mask"})
    has_other_masks = any(isinstance(other, MaskPattern) for other in others)
    if has_other_masks or (mask is not None and pattern is None):
        yield f"{name} is given masks otherwise than as attention_mask"
    for key, value in inputs.items():
        is_choice = by_rows and key.endswith("indices")
        if not is_choice and any(isinstance(leaf, Other) for leaf in tree_leaves(value)):
            yield f"{name} is given more by the block before it than hidden states: {key}"
            break
    if "packing" not in inputs:
        found.blocks_without_packing.append(name)
        if not mixes:
            yield f"{name} ({children}) has no part that is known to mix tokens"
    for part in by_rows:
        found.mixers.setdefault(name, []).append(f"{name}.{part}")
        own = OwnAttention(pattern or MaskPattern(), is_eager=True)
        found.own_attention[f"{name}.{part}"] = own
        yield from _own_problems(f"{name}.{part}", block.get_submodule(part), inputs)
    for part in attention_parts:
        attention = block.get_submodule(part)
        if part in by_rows:
            continue
        if not _passes_keywords_on(attention):
            yield f"{name}.{part} does not pass on to its attention where sequences begin"
        if not _passes_keywords_on(block):
            found.attention_without_packing.setdefault(name, []).append(f"{name}.{part}")
        found.mask_patterns[f"{name}.{part}"] = pattern or MaskPattern()
        if len(_interface_calls(type(attention).forward)) > 1:
            found.repeated.append(f"{name}.{part}")
        yield from _attention_problems(f"{name}.{part}", attention, found)
    for part in mixing_parts:
        if supports_packed_states(block.get_submodule(part)):
            found.states.setdefault(name, []).append(f"{name}.{part}")
            continue
        found.mixers.setdefault(name, []).append(f"{name}.{part}")
        if pattern and not attention_parts:
            found.own_attention[f"{name}.{part}"] = OwnAttention(pattern, _biases(inputs))
            yield from _own_problems(f"{name}.{part}", block.get_submodule(part), inputs)
    for part, module in block.named_modules():
        if isinstance(module, nn.Conv1d) and not _is_within(part, [*mixing_parts, *by_rows]):
            yield f"{name}.{part} is a convolution over the tokens of the row"


def _mixing_outside_blocks(hf_model: nn.Module) -> Iterator[str]:
    """Yield which modules mix tokens and are in none of the blocks."""
    own = set(blocks(hf_model).values())
    inside = {module for block in own for module in block.modules()}
    base_name, base = base_of(hf_model)
    for name, module in base.named_modules():
        holds_blocks = any(part in own for part in module.modules())
        if (
            module not in inside
            and not holds_blocks
            and not _looks_up_positions(module)
            and (_mixes_tokens(module) or _calls_interface(module))
        ):
            yield f"{base_name}.{name} ({type(module).__name__}) mixes tokens outside of its layers"


def _biases(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which inputs of a block are biases by the position of the key in the row (ALiBi).

    Those are [Hq, 1, T]: 0 at the first key, and growing by equal steps.
    """
    found = []
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[1:] == (1, TRIAL_TOKENS):
            steps = value.double().diff(dim=-1)
            if not value[..., 0].any() and torch.allclose(steps, steps[..., :1], rtol=0.02):
                found.append(name)
    return tuple(found)


def _own_problems(name: str, module: nn.Module, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Yield why attention by the model's own code cannot compute one sequence per row."""
    if "attention_mask" not in inspect.signature(type(module).forward).parameters:
        yield f"{name} attends by code of its own, without an attention_mask"
    known = _biases(inputs)
    for key, value in inputs.items():
        if not isinstance(value, Tensor) or key in known:
            continue
        is_of_tokens = value.shape[:2] == (1, TRIAL_TOKENS)
        if TRIAL_TOKENS in value.shape and not is_of_tokens:
            yield f"{name} is given {key} {list(value.shape)}, by the place of tokens in the row"


def _mixing_parts(block: nn.Module) -> tuple[list[str], list[str]]:
    """Return the attention modules of a block that call the interface, and its outermost other
    modules that mix tokens, by name."""
    attention = [name for name, part in block.named_modules() if name and _calls_interface(part)]
    mixing: list[str] = []
    for name, part in block.named_modules():
        is_known = not name or _is_within(name, [*attention, *mixing])
        holds_attention = any(_is_within(own, [name]) for own in attention)
        if not is_known and not holds_attention and _mixes_tokens(part):
            mixing.append(name)
    return attention, mixing


def _is_within(name: str, others: list[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _looks_up_positions(module: nn.Module) -> bool:
    """Return whether a module embeds the positions that it gets. OPT's module also takes the mask,
    from which it counts positions if it gets none."""
    parameters = [*inspect.signature(type(module).forward).parameters][1:]
    is_of_both = isinstance(module, nn.Embedding) and "attention_mask" in parameters
    return parameters[:1] == ["position_ids"] or (is_of_both and "position_ids" in parameters)


def _mixes_tokens(module: nn.Module) -> bool:
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        return True
    return bool(_MIXING_PARAMETERS & set(inspect.signature(type(module).forward).parameters))


def _chooses_keys(attention: nn.Module) -> bool:
    """Return whether attention by transformers' interface chooses or weighs keys by code of its
    own, which its eager form adds to the mask."""
    parts = [part for part in attention.modules() if part is not attention]
    options = _unsupported_options(type(attention).forward)
    return any(map(_mixes_tokens, parts)) or any(f"by its {name}" in options for name in CHOOSING)


def _attention_problems(name: str, module: nn.Module, found: PackingSupport) -> Iterator[str]:
    if "torch.arange" in _code(type(module).forward):
        # Llama 4 scales queries by their position in the row, as the last step before attention.
        if not hasattr(module, "attn_temperature_tuning"):
            yield f"{name} counts the places of tokens by the row, not by their sequence"
        elif module.attn_temperature_tuning and not module.use_rope:
            found.temperatures[name] = Temperature(module.floor_scale, module.attn_scale)
    yield from (f"{name} attends {what}" for what in _unsupported_options(type(module).forward))
    if not getattr(module, "is_causal", True):
        yield f"{name} attends in both directions"


@cache
def _unsupported_options(forward: Any) -> tuple[str, ...]:
    """Return the options that an attention module passes and our kernels do not support."""
    found = []
    for call in _interface_calls(forward):
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        found += [f"by its {name}" for name in CHOOSING if name in options]
        # Its first arguments are module, query, key, value and mask.
        mask = call.args[4] if len(call.args) > 4 else None
        mask = options.get("attention_mask", mask)
        if mask is not None and ast.unparse(mask) not in ("attention_mask", "None"):
            found.append(f"by a mask of its own, {ast.unparse(mask)}")
    return tuple(found)


@cache
def _interface_calls(forward: Any) -> tuple[ast.Call, ...]:
    """Return the calls of the attention function in a module's forward: only they have options for
    scaling or dropout."""
    calls = [
        node for node in ast.walk(ast.parse(dedent(_code(forward)))) if isinstance(node, ast.Call)
    ]
    return tuple(c for c in calls if {k.arg for k in c.keywords} & {"scaling", "dropout"})


def _passes_keywords_on(module: nn.Module) -> bool:
    """Return whether a module takes further keyword arguments and passes them to a call."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    others = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    # The signature has the name once.
    return bool(others) and _code(type(module).forward).count(f"**{others[0]}") > 1


def _calls_interface(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _code(type(module).forward)


@cache
def _code(forward: Any) -> str:
    """Return the source of a module's forward; empty if there is none: then it is no attention."""
    with suppress(OSError, TypeError):
        return inspect.getsource(forward)
    return ""


# --------------------------------------------------------------------------- computing


_PACKING_ARGUMENTS = ("packing", "work")
"""Arguments that say where sequences begin: the trainer's, the transformers engine's."""


def _packing_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in _PACKING_ARGUMENTS if name in kwargs}


class _PassToBlocks:
    """Passes the packing from the base model to blocks, where the model's own code does not.

    Args:
        names: of the blocks, within the base.
    """

    def __init__(self, names: list[str]):
        self._names = names
        self._arguments: dict[str, Any] = {}
        self._is_on = False

    def __call__(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Store the packing before the base runs."""
        self._arguments = _packing_arguments(kwargs)
        # Blocks are wrapped after this object was made. Only a hook of the outermost wrapper adds
        # the packing to the arguments that a recomputation gets again. Calls before the first row
        # have no packing.
        if self._arguments and not self._is_on:
            for name in self._names:
                block = base.get_submodule(name)
                block.register_forward_pre_hook(self._add, with_kwargs=True, prepend=True)
            self._is_on = True
        return args, _accepted(base, kwargs)

    def _add(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, **self._arguments}


def _accepted(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without the packing, where a module takes no further ones."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return kwargs
    return {name: value for name, value in kwargs.items() if name not in _PACKING_ARGUMENTS}


def _store_packing(
    modules: list[nn.Module], block: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Before a block runs: store its packing in modules that do not get it as an argument."""
    for module in modules:
        module.packing_arguments = _packing_arguments(kwargs)
    return args, _accepted(block, kwargs)


def _add_packing(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before attention runs: add the packing that its block stored."""
    return args, {**kwargs, **attention.packing_arguments}


def _with_placeholder_masks(
    hf_model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a base whose attention gets its masks from `_by_rows`.

    Some bases compute with the masks that they make, so these have to be tensors.
    """
    with attention_implementation(hf_model, PLACEHOLDER_MASKS):
        return forward(*args, **kwargs)


def _stored_packing(mixer: Any) -> Packing | SlicedPacking:
    """Return the packing of the row that a layer computes."""
    arguments = mixer.packing_arguments
    packing = arguments["packing"] if "packing" in arguments else arguments["work"].packing
    return packing


def _stored_row(mixer: Any) -> StateRow:
    """Return the row, all or a part of which a layer with a state computes."""
    return StateRow.of(_stored_packing(mixer), vars(mixer).get("tensor_group"))


@torch.compiler.disable
def _in_one_row(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a layer with a state, without the packing arguments, which it may not know.

    It is not compiled, because its number of chunks varies; the rest of its block is.
    """
    known = {name: value for name, value in kwargs.items() if name not in _PACKING_ARGUMENTS}
    return forward(*args, **known)


def _by_rows(
    mixer: nn.Module,
    forward: Callable[..., Any],
    hidden_states: Tensor,
    *args: Any,
    attention: OwnAttention | None,
    **kwargs: Any,
) -> Any:
    """Compute a layer with one sequence per row: [1, T, H] to [1, T, H].

    Sequences of similar length are computed together, [B, L, H], each padded with its own last
    token. Layers are causal, so no token sees a later one.

    Args:
        forward: the layer's own.
        attention: the other inputs of attention by the model's own code. With biases of keys,
            sequences are computed one by one, since models batch such biases differently.
        args, kwargs: the layer's other arguments. Tensors [1, T, ...] are cut in the same way; the
            packing arguments, which the layer does not know, are left out.
    Returns: what the layer does, with indices of keys as `_Choices`, parameters as they are, and
        None for each other output after the first: these are of padded rows (attention weights, a
        last state), and a model that computes with them fails.
    """
    packing = _stored_packing(mixer)
    assert isinstance(packing, Packing) and packing.keys is None, "a state begins with its sequence"
    # Without self and hidden_states.
    names = [*inspect.signature(type(mixer).forward).parameters][2:]
    kwargs |= dict(zip(names, args))
    kwargs = {k: v for k, v in kwargs.items() if k not in _PACKING_ARGUMENTS}
    length = hidden_states.shape[1]

    def padded_rows(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, length)
        return pad(value.squeeze(0), packing) if is_of_tokens else value

    biases = {name: kwargs.pop(name) for name in (attention.biases if attention else ())}
    whole = padded_rows(hidden_states)
    others = tree_map(padded_rows, kwargs)
    padded = whole.shape[0]
    outputs: list[Any] = []
    is_eager = attention is not None and attention.is_eager
    for start, count, rows in _row_groups(packing, one_by_one=bool(biases)):
        end = start + count * rows

        def cut(value: Any) -> Any:
            if isinstance(value, _Choices):
                return value.of_groups[len(outputs)]
            if not isinstance(value, Tensor) or value.shape[:1] != (padded,):
                return value
            return value[start:end].unflatten(0, (count, rows))

        # Biases depend on the position of a key alone, and each sequence begins at 0.
        own = tree_map(cut, others) | {name: bias[..., :rows] for name, bias in biases.items()}
        if attention:
            mask = attention.mask(rows, like=hidden_states)
            own["attention_mask"] = mask.expand(count, -1, -1, -1)
        with attention_implementation(mixer, "eager") if is_eager else nullcontext():
            outputs.append(forward(cut(whole), **own))
    is_several = isinstance(outputs[0], (tuple, list))
    firsts = [output[0] if is_several else output for output in outputs]
    joined = unpad(torch.cat([first.flatten(0, 1) for first in firsts]), packing)[None]
    if not is_several:
        return joined
    return type(outputs[0])((joined, *map(_choices, [*zip(*outputs)][1:])))


@dataclass(frozen=True)
class _Choices:
    """The keys that an indexer chose, which later layers take too."""

    of_groups: tuple[Tensor, ...]
    """[B, L, keys] int32 for each group of padded rows."""


def _choices(outputs: tuple[Any, ...]) -> _Choices | nn.Parameter | None:
    """Return a layer's outputs for groups of padded rows, if they are indices, or a parameter that
    the block adds; else None."""
    if isinstance(outputs[0], nn.Parameter):
        return outputs[0]
    are_indices = all(isinstance(x, Tensor) and x.dtype == torch.int32 for x in outputs)
    return _Choices(outputs) if are_indices else None


def _row_groups(packing: Packing, *, one_by_one: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first padded row, number of sequences, tokens of each) of each computation."""
    for group in packing.groups:
        if one_by_one:
            for at in range(group.count):
                yield group.start + at * group.length, 1, group.length
        else:
            yield group.start, group.count, group.length
