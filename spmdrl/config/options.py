"""Mappings with open names: the options of a named method, of an environment, of vLLM."""

from __future__ import annotations

import re
from typing import Any

Options = dict[str, bool | int | float | str]
"""Options of a method by their names."""
NestedOptions = dict[str, Any]
"""The same where lists and mappings may stand in it."""


def option_value(value: Any) -> Any:
    """Return an option as it is meant: YAML 1.1 reads 1e-8 as text, for want of a dot."""
    if isinstance(value, dict):
        return {str(name): option_value(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [option_value(own) for own in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value
