"""Save an environment's state as plain data. Loading it runs no code of the file that holds it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

PLAIN = b"J"
PICKLED = b"P"
"""First byte of a packed environment: JSON of `text_of`, or a pickle."""
_SCALARS = (type(None), bool, str)


class NotPlain(Exception):
    """A part of an environment is not plain data; the message names it."""


def text_of(environment: Any) -> str:
    """Return the state of an environment as JSON: the result of its `save()`, or its attributes.

    Plain data are None, bool, int, float, str, bytes, lists, tuples, dicts and sets of plain data,
    `random.Random`, and objects with plain attributes whose class is in the environment's module. A
    mutable object may be in one place only, since it would be restored as two objects.

    Raises: NotPlain naming the part that is not plain data.
    """
    writer = _Writer(type(environment).__module__)
    name = type(environment).__name__
    if has_save_and_restore(environment):
        return json.dumps(["saved", writer.write(environment.save(), f"{name}.save()")])
    return json.dumps(["attributes", writer.write_attributes(environment, name)])


def environment_of(text: str, kind: type, make: Callable[[], Any]) -> Any:
    """Return an environment with the state that `text_of` wrote.

    Args:
        kind: the environment's class.
        make: constructs an environment, for a class with `restore`. Objects of other classes are
            made without their constructor.
    Raises: NotPlain, or an error of `restore`, if another class or another version of it wrote
        the text.
    """
    form, state = json.loads(text)
    if (form == "saved") != has_save_and_restore(kind):
        raise NotPlain(f"this version of {kind.__name__} does not write the form {form!r}")
    reader = _Reader(kind.__module__)
    if form == "attributes":
        return reader.make_object(kind, state)
    environment = make()
    environment.restore(reader.read(state))
    return environment


def has_save_and_restore(environment: Any) -> bool:
    """Return whether an environment, or its class, has `save` and `restore`."""
    return all(callable(getattr(environment, name, None)) for name in ("save", "restore"))


class _Writer:
    """Writes values as JSON: scalars unchanged, others as lists that begin with their type."""

    def __init__(self, module: str):
        self._module = module
        # Keep the objects, so that no new object gets the id of a deleted one.
        self._seen: dict[int, Any] = {}

    def write(self, value: Any, place: str) -> Any:
        """Return JSON of a value. Raises: NotPlain."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is int:  # Python does not read decimal integers of many digits
            return value if value.bit_length() < 1000 else ["int", hex(value)]
        # Hex digits hold every bit of a float, and JSON has no NaN or infinity.
        if kind in (float, bytes):
            return [kind.__name__, value.hex()]
        if id(value) in self._seen:
            raise NotPlain(f"{place} is also in another place")
        # An immutable object may be restored as two copies.
        if kind not in (tuple, frozenset):
            self._seen[id(value)] = value
        if kind in (list, tuple, set, frozenset):
            items = [self.write(item, f"{place}[{i}]") for i, item in enumerate(value)]
            return [kind.__name__, items]
        if kind is dict:
            pairs = []
            for key, own in value.items():
                written = self.write(key, f"a key of {place}")
                pairs.append([written, self.write(own, f"{place}[{key!r}]")])
            return ["dict", pairs]
        if kind is random.Random:
            return ["random", self.write(value.getstate(), place)]
        return ["object", kind.__qualname__, self.write_attributes(value, place)]

    def write_attributes(self, value: Any, place: str) -> Any:
        """Return JSON of an object's attributes. Raises: NotPlain."""
        kind = type(value)
        if kind.__module__ != self._module or not is_simple(kind):
            raise NotPlain(f"{place} ({kind.__module__}.{kind.__qualname__})")
        written = {}
        for name, own in vars(value).items():
            written[name] = self.write(own, f"{place}.{name}")
        return written


class _Reader:
    """Reads what _Writer wrote. It makes only plain values and simple objects of one module."""

    def __init__(self, module: str):
        self._module = module

    def read(self, value: Any) -> Any:
        """Return a value. Raises: NotPlain for JSON that no _Writer wrote."""
        if type(value) in (*_SCALARS, int):
            return value
        match value:
            case ["int", str(text)]:
                return int(text, 16)
            case ["float", str(text)]:
                return float.fromhex(text)
            case ["bytes", str(text)]:
                return bytes.fromhex(text)
            case ["list" | "tuple" | "set" | "frozenset" as kind, list(items)]:
                kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
                return kinds[kind](map(self.read, items))
            case ["dict", list(pairs)]:
                return {self.read(k): self.read(v) for k, v in pairs}
            case ["random", state]:
                generator = random.Random()
                generator.setstate(self.read(state))
                return generator
            case ["object", str(name), dict(attributes)]:
                return self.make_object(self._find_class(name), attributes)
        raise NotPlain(f"it holds {value!r:.100}, which is not plain data")

    def make_object(self, kind: type, attributes: dict[str, Any]) -> Any:
        """Return an object of a class with these attributes, made as unpickling makes one."""
        if not isinstance(attributes, dict):
            raise NotPlain(f"the attributes of {kind.__name__} are {attributes!r:.100}")
        made: Any = object.__new__(kind)
        for name, own in attributes.items():
            vars(made)[name] = self.read(own)
        return made

    def _find_class(self, name: str) -> type:
        kind: Any = sys.modules.get(self._module)
        for part in name.split("."):
            kind = getattr(kind, part, None)
        is_own = isinstance(kind, type) and kind.__module__ == self._module
        if not is_own or not is_simple(kind):
            raise NotPlain(f"it names {name}, which is not a class of {self._module}")
        return kind


def is_simple(kind: type) -> bool:
    """Return whether the attributes of an object of a class are all of its state."""
    # `typing.Generic` and `Protocol` have empty __slots__, which hold nothing.
    return (
        kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and not hasattr(kind, "__setstate__")
        and not any("__slots__" in vars(b) for b in kind.__mro__ if b.__module__ != "typing")
        and kind.__dictoffset__ != 0
    )
