"""Descriptions of typed Python functions for chat templates, and checks of arguments.

The descriptions equal those of `transformers.utils.get_json_schema`, and a test checks this. That
function imports torch, which is too heavy for worker processes, and it describes unknown types such
as bytes as objects.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spmdrl.errors import Refusal
from spmdrl.imports import nearest

_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_KINDS = {name: kind for kind, name in _TYPES.items()}
_SECTION = re.compile(r"\n\s*(Args|Returns|Raises):", re.IGNORECASE)
_ARGUMENT = re.compile(r"\s*(\w+):\s*(.*)")


def describe(function: Callable[..., Any], *, name: str = "") -> dict[str, Any]:
    """Return a function's description for a chat template.

    Args:
        function: with type hints and a docstring whose `Args:` describe each parameter.
        name: name of the tool; by default the function's.
    Raises: Refusal for a missing docstring, or a parameter without hint or description: the policy
        learns about a tool from nothing else.
    """
    name = name or function.__name__
    doc = inspect.getdoc(function)
    if not doc:
        raise Refusal(f"tool {name}: has no docstring, which would describe it to the policy")
    summary, descriptions = _read_docstring(doc)
    hints = get_type_hints(function)
    properties = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        place = f"tool {name}, parameter {parameter.name}"
        if parameter.name not in hints:
            raise Refusal(f"{place}: has no type hint")
        if parameter.name not in descriptions:
            raise Refusal(f"{place}: is not described under `Args:` of the docstring")
        properties[parameter.name] = _schema_of(hints[parameter.name], place=place) | {
            "description": descriptions[parameter.name]
        }
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the text before the sections, and {parameter: description}."""
    pieces = _SECTION.split(doc)
    descriptions: dict[str, str] = {}
    for title, body in zip(pieces[1::2], pieces[2::2]):
        if title != "Args":
            continue
        lines = [line for line in body.splitlines() if line.strip()]
        margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
        last = ""
        for line in lines:
            match = _ARGUMENT.fullmatch(line)
            if match and len(line) - len(line.lstrip()) == margin:
                last = match[1]
                descriptions[last] = match[2].strip()
            elif last:
                descriptions[last] += " " + line.strip()
    return pieces[0].strip(), descriptions


def _schema_of(hint: Any, *, place: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Literal:
        kinds = {_TYPES.get(type(value)) for value in args}
        if len(kinds) == 1 and None not in kinds:
            return {"type": kinds.pop(), "enum": list(args)}
    if origin is list:
        return {"type": "array", "items": _schema_of(args[0], place=place)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(args[1], place=place)}
    if origin in (Union, types.UnionType):
        parts = [_schema_of(part, place=place) for part in args if part is not type(None)]
        schema: dict[str, Any] = {"anyOf": parts}
        if len(parts) == 1:
            schema = parts[0]
        elif all(set(part) == {"type"} for part in parts):
            schema = {"type": sorted(part["type"] for part in parts)}
        if type(None) in args:
            schema = schema | {"nullable": True}
        return schema
    raise Refusal(
        f"{place}: type {hint} cannot be described to a model; use str, int, float, "
        "bool, list, dict, Literal, or unions of these"
    )


def argument_problem(arguments: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return why arguments do not fit a description's `parameters`; empty if they do."""
    properties = schema["properties"]
    for name in arguments:
        if name not in properties:
            return f"unknown argument {name!r}{nearest(name, properties)}"
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        problem = _value_problem(value, properties[name])
        if problem:
            return f"argument {name!r}: {problem}"
    return ""


def _has_type(value: Any, kind: str) -> bool:
    # A bool is an int in Python, but not a number in JSON.
    if kind == "number" and isinstance(value, (int, float)):
        return type(value) is not bool and math.isfinite(value)
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or type(value) is not bool)


def _value_problem(value: Any, schema: dict[str, Any]) -> str:
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        problems = [_value_problem(value, part) for part in schema["anyOf"]]
        return "" if "" in problems else " or ".join(problems)
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        return f"expected {' or '.join(kinds)}, got {value!r:.60}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(repr, schema['enum']))}, got {value!r:.60}"
    inner = schema.get("items" if isinstance(value, list) else "additionalProperties")
    if not inner or not isinstance(value, (list, dict)):
        return ""
    for part in value if isinstance(value, list) else value.values():
        if problem := _value_problem(part, inner):
            return problem
    return ""
