"""Mappings with open names: the options of a named method, of an environment, of vLLM."""

from __future__ import annotations

import math
import re
from typing import Any

from spmdrl.errors import Refusal, describe

Options = dict[str, bool | int | float | str]
"""Options of a method by their names."""
NestedOptions = dict[str, Any]
"""The same, where a value may also be a list or mapping."""


def option_value(value: Any) -> Any:
    """Return an option, as a number if it is one: YAML 1.1 reads 1e-8, without a dot, as text.

    Raises: Refusal for nan, a text that no file can hold, and a value that is not plain data.
    """
    if isinstance(value, dict):
        return {option_name(name): option_value(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [option_value(own) for own in value]
    if isinstance(value, str):
        is_number = re.fullmatch(r"[-+]?\d{1,400}(\.\d{0,400})?[eE][-+]?\d{1,9}", value)
        return float(value) if is_number else check_text(value)
    if isinstance(value, float) and math.isnan(value):
        raise Refusal("expected a number, got nan")
    if value is not None and not isinstance(value, (bool, int, float)):
        raise Refusal(f"expected text, numbers, lists or mappings, got {describe(value)}")
    return value


def option_name(name: Any) -> str:
    """Return the name of an option. Raises: Refusal if it is no text."""
    if not isinstance(name, str):
        raise Refusal(
            f"names are texts, and {describe(name)} is none; put it in quotes to make it one"
        )
    return check_text(name)


_MOST_CHARACTERS = 2**16


def check_text(text: str) -> str:
    """Return a text. Raises: Refusal if no file, name or message can hold it."""
    if len(text) > _MOST_CHARACTERS:
        raise Refusal(f"is a text of {len(text)} characters; at most {_MOST_CHARACTERS} are taken")
    for i, character in enumerate(text):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            kind = "a NUL" if character == "\0" else "half of a character"
            raise Refusal(f"{describe(text)} holds {kind}, {character!r}, at {i + 1}; take it out")
    return text
