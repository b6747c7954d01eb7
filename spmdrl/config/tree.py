"""The fields of a config by their dotted names, and values of the right types for them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import operator
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeGuard, Union

from spmdrl.config.fields import Config
from spmdrl.config.options import check_text, option_name, option_value
from spmdrl.config.other_frameworks import in_other_frameworks, value_in_other_frameworks
from spmdrl.config.ranges import AddressForm, PathForm, Range
from spmdrl.errors import Refusal, describe
from spmdrl.imports import nearest

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
    """Return {dotted name: bound} of all bounded fields; for a list, the bound of its items."""
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


def build(flat: Mapping[str, Any], cls: type = Config, *, prefix: str = "") -> Any:
    """Return the config with these values, and defaults for the rest."""
    values = {}
    for name, hint in hints(cls).items():
        if is_section(hint):
            values[name] = build(flat, hint, prefix=f"{prefix}{name}.")
        elif prefix + name in flat:
            own = flat[prefix + name]
            has_fields = isinstance(own, tuple) and any(isinstance(v, dict) for v in own)
            # `flatten` returns items with fields as mappings.
            values[name] = convert(list(own), hint) if has_fields else own
    return cls(**values)


def leaves(tree: Mapping[Any, Any], prefix: str = "", *, problems: list[str]) -> dict[str, Any]:
    """Return {dotted name: value} of nested mappings, as far as they are sections.

    Args:
        problems: gets the fields that are there twice.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        own = {name: value}
        if name in sections() and isinstance(value, dict):
            own = leaves(value, f"{name}.", problems=problems)
        twice = own.keys() & flat.keys()
        problems += [f"{n}: is there twice, as a.b and in the mapping a" for n in twice]
        flat |= own
    return flat


def fields_of(section: str, *, start: str = "") -> list[str]:
    """Return the dotted names of a section's own fields, each after `start`."""
    return [f"{start}{name}" for name in settings() if name.rpartition(".")[0] == section]


def item_fields(hint: Any) -> type | None:
    """Return the dataclass of a list's items; None where they have no fields."""
    items = (item for kind in kinds(hint) for item in _items(kind))
    return next((item for item in items if is_section(item)), None)


def unknown_key(name: str) -> str:
    """Return that there is no such field, with the most similar one."""
    other = in_other_frameworks(name)
    return f"unknown key; {other}" if other else f"unknown key{nearest_field(name)}"


def nearest_field(name: str) -> str:
    """Return the field that an unknown name probably means, for the end of a message."""
    section, _, key = name.rpartition(".")
    same = same_name(key)
    if same:  # the right name in the wrong section
        return f"; did you mean {same}?"
    own = list(hints(sections().get(section, Config)))
    near = difflib.get_close_matches(key, own, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    # Only now all sections, and closer: a similar name of the same section is more likely.
    names = [known.rpartition(".")[2] for known in settings()]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    if near:
        return f"; did you mean {same_name(near[0])}?"
    return f"; known here: {', '.join(own)}"


def same_name(name: str) -> str:
    """Return the first field with the same last part as a name; empty where there is none."""
    key = name.rpartition(".")[2]
    return next((known for known in settings() if known.rpartition(".")[2] == key), "")


def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types that a value may have: the members of a union, or the type itself."""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    """Put a place before the message of a Refusal."""
    try:
        yield
    except Refusal as error:
        raise Refusal(f"{place}: {error}") from None


def convert(value: Any, hint: Any) -> Any:
    """Return a value of YAML as the type of a field has it. Raises: Refusal."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return option_value(value)
    if len(kinds(hint)) > 1:
        return _one_of(value, args)
    if origin is Literal:
        return _choice(value, args)
    if origin is tuple:
        return _list_of(value, args[0])
    if origin is dict:
        if not isinstance(value, dict):
            raise Refusal(f"expected a mapping such as {{name: 1.5}}, got {describe(value)}")
        return {option_name(name): _option(name, own, args[1]) for name, own in value.items()}
    if is_section(hint):
        return _section(value, hint)
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-6 as a string
        except (ValueError, OverflowError):
            raise Refusal(f"expected a number, got {describe(value)}") from None
    # Not isinstance: True is an int.
    if type(value) is not hint:
        expected = "true or false" if hint is bool else hint.__name__
        raise Refusal(f"expected {expected}, got {describe(value)}")
    return check_text(value) if isinstance(value, str) else value


def _choice(value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    hint = value_in_other_frameworks(value, choices=choices)
    near = difflib.get_close_matches(str(value), choices, n=1)
    if near and not hint:
        hint = f"did you mean {near[0]}?"
    raise Refusal(f"{describe(value)} is not one of {', '.join(choices)}{hint and f'; {hint}'}")


def _list_of(value: Any, hint: Any) -> tuple[Any, ...]:
    """Return a list; a single value becomes a list of one."""
    if value is None:
        raise Refusal(f"expected {type_text(hint)} ..., such as [], got {describe(value)}")
    found = []
    for i, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
        with _at(f"[{i}]"):
            found.append(convert(item, hint))
    return tuple(found)


def _option(name: Any, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except Refusal as error:
        if value is None and ":" in str(name):
            raise Refusal(f"{{{name}}}: a space is missing after the colon") from None
        raise Refusal(f"{{{name}: ...}}: {error}") from None


def _section(value: Any, cls: type) -> Any:
    """Return an item of a list that has fields. A text is its first field."""
    types = hints(cls)
    if isinstance(value, str):
        value = {next(iter(types)): value}
    if not isinstance(value, dict):
        raise Refusal(f"expected {{{', '.join(types)}}}, got {describe(value)}")
    for key in value:
        if key not in types:
            raise Refusal(f"unknown key {describe(key)}{nearest(str(key), types)}")
    return cls(**{key: _option(key, own, types[key]) for key, own in value.items()})


def _one_of(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        origin = typing.get_origin(hint)
        is_item = item_fields(hint) is not None and isinstance(value, dict)
        if origin is tuple and (is_item or isinstance(value, (list, tuple))):
            return convert(value, hint)
        if type(value) in (hint, origin):
            # A text such as 1e3 is a number only where one is allowed.
            is_text = isinstance(value, str) and float not in hints
            return check_text(value) if is_text else option_value(value)
        if origin is Literal and value in typing.get_args(hint):
            return value
    raise Refusal(f"expected {'|'.join(map(type_text, hints))}, got {describe(value)}")


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
