"""Checks of the values in a JSON file of a run, which another person may have written.

A form is a function that tells whether a value is right. Its docstring says what a value must be,
and messages show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spmdrl.errors import Refusal

Form = Callable[[Any], bool]


def check_values(values: Mapping[str, Any], forms: Mapping[str, Form], *, within: str = "") -> None:
    """Refuse an object that lacks a value, or has one of another form.

    Args:
        forms: {name: form}; other names are not looked at.
        within: place of the object, for messages: `config`.
    Raises: Refusal naming the first one.
    """
    for name, is_right in forms.items():
        place = f"{within}.{name}" if within else name
        if name not in values:
            raise Refusal(f"has no {place}")
        if not is_right(values[name]):
            raise Refusal(
                f"holds {values[name]!r:.60} as {place}, which must be {is_right.__doc__}"
            )


def is_text(value: Any) -> bool:
    """a text"""
    return isinstance(value, str)


def is_bool(value: Any) -> bool:
    """true or false"""
    return isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """a whole number"""
    return type(value) is int


def is_count(value: Any) -> bool:
    """a whole number, at least 0"""
    return is_whole(value) and value >= 0


def is_number(value: Any) -> bool:
    """a number"""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_object(value: Any) -> bool:
    """an object"""
    return isinstance(value, dict)


def is_list(value: Any) -> bool:
    """a list"""
    return isinstance(value, list)


def are_texts(value: Any) -> bool:
    """a list of texts"""
    return is_list(value) and all(map(is_text, value))


def are_wholes(value: Any) -> bool:
    """a list of whole numbers"""
    return is_list(value) and all(map(is_whole, value))


def are_objects(value: Any) -> bool:
    """a list of objects"""
    return is_list(value) and all(map(is_object, value))
