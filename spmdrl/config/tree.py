"""The fields of a config by their dotted names, and values of the right types for them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard, Union

from spmdrl.config.fields import Config
from spmdrl.config.options import checked_text, option_name, option_value, shown
from spmdrl.config.other_frameworks import in_other_frameworks, value_in_other_frameworks
from spmdrl.config.ranges import AddressForm, PathForm, Range
from spmdrl.errors import Refusal

Bound = Range | PathForm | AddressForm


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    return typing.get_type_hints(cls)


def is_section(hint: Any) -> TypeGuard[type]:
    """Return whether a field of this type has fields of its own."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


@functools.cache
def sections() -> dict[str, type]:
    """Return {dotted name: dataclass} of all sections, in order; "" is the config itself."""
    found: dict[str, type] = {}

    def walk(cls: type, prefix: str) -> None:
        found[prefix.rstrip(".")] = cls
        for name, hint in hints(cls).items():
            if is_section(hint):
                walk(hint, f"{prefix}{name}.")

    walk(Config, "")
    return found


@functools.cache
def settings() -> dict[str, Any]:
    """Return {dotted name: type} of all fields that hold a value."""
    return {
        f"{section}.{name}".lstrip("."): hint
        for section, cls in sections().items()
        for name, hint in hints(cls).items()
        if not is_section(hint)
    }


@functools.cache
def bounds() -> dict[str, Bound]:
    """Return {dotted name: bound} of all fields whose numbers or paths are bounded; of a list, that
    of its items."""
    return {
        f"{section}.{name}".lstrip("."): bound
        for section, cls in sections().items()
        for name, bound in bounds_of(cls).items()
    }


@functools.cache
def bounds_of(cls: type) -> dict[str, Bound]:
    """Return {name: bound} of a dataclass's own fields; see `bounds`."""
    return {
        name: bound
        for name, hint in typing.get_type_hints(cls, include_extras=True).items()
        for kind in kinds(hint)
        for own in (kind, *_items(kind))
        for bound in getattr(own, "__metadata__", ())
    }


def _items(hint: Any) -> tuple[Any, ...]:
    """Return the type of a list's items, if it is one."""
    return typing.get_args(hint)[:1] if typing.get_origin(hint) is tuple else ()


def flatten(cfg: Config) -> dict[str, Any]:
    """Return {dotted field name: value} of a config; items of lists with fields as mappings."""
    return {name: _plain_items(operator.attrgetter(name)(cfg)) for name in settings()}


def _plain_items(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return tuple(dataclasses.asdict(v) if is_section(type(v)) else v for v in value)


def changed(section: Any) -> dict[str, Any]:
    """Return the fields of a section that are not as they are by default."""
    fields = dataclasses.fields(section)
    return {f.name: v for f in fields if (v := getattr(section, f.name)) != f.default}


def build(flat: Mapping[str, Any], cls: type = Config, *, prefix: str = "") -> Any:
    """Return the config with these values, and defaults for the rest."""
    values = {}
    for name, hint in hints(cls).items():
        if is_section(hint):
            values[name] = build(flat, hint, prefix=f"{prefix}{name}.")
        elif prefix + name in flat:
            own = flat[prefix + name]
            has_fields = isinstance(own, tuple) and any(isinstance(v, dict) for v in own)
            values[name] = convert(list(own), hint) if has_fields else own
    return cls(**values)


def leaves(tree: Mapping[Any, Any], prefix: str = "", *, problems: list[str]) -> dict[str, Any]:
    """Return {dotted name: value} of nested mappings, as far as they are sections.

    Args:
        problems: gets what is there twice.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        own = {name: value}
        if name in sections() and isinstance(value, dict):
            own = leaves(value, f"{name}.", problems=problems)
        twice = own.keys() & flat.keys()
        problems += [f"{n}: stands there twice, as a.b and in the mapping a" for n in twice]
        flat |= own
    return flat


def fields_of(section: str, *, start: str = "") -> list[str]:
    """Return the dotted names of a section's own fields, each after `start`."""
    return [f"{start}{name}" for name in settings() if name.rpartition(".")[0] == section]


def item_fields(hint: Any) -> type | None:
    """Return the dataclass of a list's items, of a field that may be one; None where they have no
    fields."""
    items = (item for kind in kinds(hint) for item in _items(kind))
    return next((item for item in items if is_section(item)), None)


def unknown_key(name: str) -> str:
    """Return that there is no such field, with the one that is probably meant."""
    other = in_other_frameworks(name)
    return f"unknown key; {other}" if other else f"unknown key{nearest_field(name)}"


def nearest_field(name: str) -> str:
    """Return what a field of an unknown name may be meant to be, for the end of a message."""
    section, _, key = name.rpartition(".")
    section = section if section in sections() else ""
    own = list(hints(sections()[section]))
    everywhere = {known.rpartition(".")[2]: known for known in reversed(settings())}
    if key in everywhere:  # the right name in the wrong section
        return f"; did you mean {everywhere[key]}?"
    if near := difflib.get_close_matches(key, own, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    if near := difflib.get_close_matches(key, list(everywhere), n=1, cutoff=0.7):
        return f"; did you mean {everywhere[near[0]]}?"
    return f"; known here: {', '.join(own)}"


def is_near(name: str) -> bool:
    """Return whether a section or field beside which a name stands is spelled nearly like it."""
    section, _, key = name.rpartition(".")
    beside = list(hints(sections()[section])) if section in sections() else []
    return bool(difflib.get_close_matches(key, beside, n=1, cutoff=0.7))


def same_name(name: str) -> str:
    """Return the first field whose last part is that of a name; empty where there is none."""
    key = name.rpartition(".")[2]
    return next((known for known in settings() if known.rpartition(".")[2] == key), "")


def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types that a value may have: those of a union, or the one."""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def convert(value: Any, hint: Any) -> Any:
    """Return a value of YAML as the type of a field has it. Raises: Refusal."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return option_value(value)
    if len(kinds(hint)) > 1:
        return _one_of(value, args)
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        near = difflib.get_close_matches(str(value), args, n=1)
        hint_text = f"; did you mean {near[0]}?" if near else ""
        if other := value_in_other_frameworks(value, choices=args):
            hint_text = f"; {other}"
        raise Refusal(f"{shown(value)} is not one of {', '.join(args)}{hint_text}")
    if origin is tuple:
        if value is None:
            raise Refusal(f"expected {type_text(hint)}, such as [], got {shown(value)}")
        # One value stands for a list of it.
        items = value if isinstance(value, (list, tuple)) else [value]
        if is_section(args[0]):
            return tuple(_item(item, args[0], place=f"[{i}]") for i, item in enumerate(items))
        return tuple(_list_item(item, args[0], place=f"[{i}]") for i, item in enumerate(items))
    if origin is dict:
        if not isinstance(value, dict):
            raise Refusal(f"expected a mapping such as {{name: 1.5}}, got {shown(value)}")
        return {option_name(k): _option(k, v, args[1]) for k, v in value.items()}
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-6 as a string
        except (ValueError, OverflowError):
            raise Refusal(f"expected a number, got {shown(value)}") from None
    if type(value) is not hint:
        expected = "true or false" if hint is bool else hint.__name__
        raise Refusal(f"expected {expected}, got {shown(value)}")
    return checked_text(value) if isinstance(value, str) else value


def _option(name: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except Refusal as error:
        if value is None and ":" in str(name):
            raise Refusal(f"{{{name}}}: a space is missing after the colon") from None
        raise Refusal(f"{{{name}: ...}}: {error}") from None


def _list_item(value: Any, hint: Any, *, place: str) -> Any:
    try:
        return convert(value, hint)
    except Refusal as error:
        raise Refusal(f"{place}: {error}") from None


def _item(value: Any, cls: type, *, place: str) -> Any:
    """Return an item of a list that has fields; a text is its first one."""
    own = hints(cls)
    found = {next(iter(own)): value} if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise Refusal(f"{place}: expected {{{', '.join(own)}}}, got {shown(value)}")
    for key in found:
        if key not in own:
            near = difflib.get_close_matches(str(key), own, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(own)}"
            raise Refusal(f"{place}: unknown key {shown(key)}; {hint}")
    try:
        return cls(**{key: _option(key, v, own[key]) for key, v in found.items()})
    except Refusal as error:
        raise Refusal(f"{place}: {error}") from None


def _one_of(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        is_one = item_fields(hint) is not None and isinstance(value, dict)
        if typing.get_origin(hint) is tuple and (is_one or isinstance(value, (list, tuple))):
            return convert(value, hint)
        if type(value) in (hint, typing.get_origin(hint)):
            is_text = isinstance(value, str) and float not in hints  # 1e3 is meant as text then
            return checked_text(value) if is_text else option_value(value)
        if typing.get_origin(hint) is Literal and value in typing.get_args(hint):
            return value
    raise Refusal(f"expected {'|'.join(map(type_text, hints))}, got {shown(value)}")


_TYPE_NAMES = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}


def type_text(hint: Any) -> str:
    """Return a type as the help and messages show it."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Literal:
        return "|".join(args)
    if len(kinds(hint)) > 1:
        return "|".join(map(type_text, args))
    if origin is tuple:
        return f"{type_text(args[0])} ..."
    return _TYPE_NAMES.get(hint, "{NAME: VALUE}")
