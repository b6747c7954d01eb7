"""The text that a teacher reads instead of a row's prompt: a column, or a template of columns."""

from __future__ import annotations

import string
from typing import Any

from spmdrl.data.rows import Messages, prompt_of
from spmdrl.errors import Refusal, describe


def template_fields(spec: str) -> list[str]:
    """Return the columns that a template names, in order; none for the name of a column.

    Raises: Refusal for a template that is not columns in braces and text.
    """
    try:
        parts = list(string.Formatter().parse(spec))
    except ValueError as error:
        raise Refusal(f"{spec!r:.100}: {error}; a brace of the text itself is doubled") from error
    named = [part for part in parts if part[1] is not None]
    for _, name, options, conversion in named:
        if not name or options or conversion or not all(map(str.isidentifier, name.split("."))):
            raise Refusal(
                f"{spec!r:.100}: braces hold the name of a column, e.g. {{answer}} or "
                f"{{reward_model.ground_truth}}, got {name!r:.60}; a brace of the text itself is "
                "doubled"
            )
    return [str(name) for _, name, _, _ in named]


def teacher_prompt_of(row: dict, spec: str, *, where: str) -> str | Messages:
    """Return what the teacher reads instead of the prompt of a row.

    Args:
        spec: see data.teacher_prompt.
        where: origin of the row, for messages.
    Raises: Refusal for a column that the row does not have, or whose value does not fit.
    """
    names = template_fields(spec)
    if not names:
        return _checked(_value(row, spec, where=where), name=spec, where=where)
    prompt = prompt_of(row)
    if isinstance(prompt, str):
        return _filled(row, spec, names, prompt=prompt, where=where)
    *before, last = prompt
    content = last.get("content")
    if not isinstance(content, str):
        raise Refusal(
            f"{where}: the last message of the prompt has no text, which the template of "
            "data.teacher_prompt would change; name a column with messages instead"
        )
    text = _filled(row, spec, names, prompt=content, where=where)
    return [*before, {**last, "content": text}]


def _filled(row: dict, spec: str, names: list[str], *, prompt: str, where: str) -> str:
    text = ""
    for literal, name, _, _ in string.Formatter().parse(spec):
        text += literal
        if name == "prompt":
            text += prompt
        elif name is not None:
            value = _value(row, name, where=where)
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise Refusal(
                    f"{where}: column {name!r}, which data.teacher_prompt names: expected text or "
                    f"a number, got {describe(value)}"
                )
            text += str(value)
    return text


def _value(row: dict, name: str, *, where: str) -> Any:
    """Return the value of a column, or within it of a field after each dot."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            raise Refusal(
                f"{where}: the row has no {name!r}, which data.teacher_prompt names; it has "
                f"columns {', '.join(map(str, row))}"
            )
        value = value[part]
    return value


def _checked(value: Any, *, name: str, where: str) -> str | Messages:
    is_chat = isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in value
    )
    if not value or not (isinstance(value, str) or is_chat):
        raise Refusal(
            f"{where}: column {name!r}, which the teacher reads: expected text or messages that "
            f"are not empty, got {describe(value)}"
        )
    return value
