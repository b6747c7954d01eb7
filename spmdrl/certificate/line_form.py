"""The form of a line of a certificate: its sections, and the type of each value.

The seals prove that lines are as somebody wrote them, and anybody can compute them. So each line is
also checked against this form, and no reader meets a value of another type.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from spmdrl.certificate.fingerprint_collector import SECTIONS
from spmdrl.certificate.fingerprints import SKETCHES
from spmdrl.errors import Refusal
from spmdrl.imports import attempt

Line = dict[str, Any]
FORMAT = 3
_SEQUENCE_BYTES = {
    "tokens": 8,
    "rollout_logprobs": 8,
    "advantages": 8,
    "rewards": 8,
    "groups": 4,
    "samples": 4,
}
"""{column of `sequences`: bytes of each sequence}."""
_DTYPES = ("bfloat16", "float16", "float32")


def problem_of(line: Line) -> str:
    """Return what is wrong with a line, with the field; empty for nothing."""
    if line.get("format") != FORMAT:
        return (
            f"is of format {line.get('format', 'unknown')}, and this program reads {FORMAT}: "
            "compare it by the version of the program that wrote it"
        )
    _, error = attempt(lambda: _check(line))
    return str(error or "")


def _check(line: Line) -> None:
    """Raise Refusal for the first value that is missing or of another type."""
    _check_value(line, "step", _is_count)
    if "made_with" in line:
        _check_value(line, "made_with", _is_object)
        _check_made(line["made_with"])
        return
    for section in (*SECTIONS, "sequences"):
        _check_value(line, section, _is_object)
    for section in SECTIONS:
        is_right = _is_measure if section in ("losses", "norms") else _is_row
        for name in line[section]:
            if (section, name) != ("plan", "tokens_per_microbatch"):
                _check_value(line[section], name, is_right, within=section)
    _check_value(line["plan"], "tokens_per_microbatch", _is_count, within="plan")
    _check_sequences(line["sequences"])
    copies = line.get("differing_copies", [])
    if not isinstance(copies, list) or not all(map(_is_text, copies)):
        raise Refusal(f"differing_copies is {copies!r:.60}, and must be a list of names")


def _check_made(made: Mapping[str, Any]) -> None:
    for section in ("config", "packages", "code", "machine"):
        _check_value(made, section, _is_object, within="made_with")
    fields = {
        "report.certificate": _is_count,
        "steps": _is_count,
        "optimizer.schedule": _is_text,
        "model.compute_dtype": _is_dtype,
    }
    for name, is_right in fields.items():
        _check_value(made["config"], name, is_right, within="made_with.config")
    for section in ("packages", "code"):
        for name in made[section]:
            _check_value(made[section], name, _is_text, within=f"made_with.{section}")


def _check_sequences(sequences: Mapping[str, Any]) -> None:
    within = "sequences"
    needed = ["rewards"]
    if "group_size" in sequences:
        _check_value(sequences, "group_size", _is_positive, within=within)
    else:
        needed += ["groups", "samples"]
    counts = {}
    for name, width in _SEQUENCE_BYTES.items():
        if name not in needed and name not in sequences:
            continue
        _check_value(sequences, name, _is_text, within=within)
        data, _ = attempt(partial(_decode, sequences[name]), ValueError)
        if data is None or len(data) % width:
            raise Refusal(
                f"{within}.{name} is {sequences[name]!r:.60}, no base64 of {width} bytes each"
            )
        counts[name] = len(data) // width
    if len({*counts.values()}) > 1:
        raise Refusal(f"{within} holds columns of different lengths: {counts}")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _check_value(
    values: Mapping[str, Any], name: str, is_right: Callable[[Any], bool], *, within: str = ""
) -> None:
    place = f"{within}.{name}" if within else name
    if name not in values:
        raise Refusal(f"has no {place}")
    if not is_right(values[name]):
        raise Refusal(f"holds {values[name]!r:.60} as {place}, which must be {is_right.__doc__}")


# What each of them accepts is its docstring, which messages show.


def _is_text(value: Any) -> bool:
    """a text"""
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    """an object"""
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    """a whole number, at least 0"""
    return type(value) is int and value >= 0


def _is_positive(value: Any) -> bool:
    """a whole number, at least 1"""
    return _is_count(value) and value > 0


def _is_dtype(value: Any) -> bool:
    """bfloat16, float16 or float32"""
    return value in _DTYPES


def _is_measure(value: Any) -> bool:
    """a number, or the text of one that is not finite"""
    return type(value) is float or value in ("inf", "-inf", "nan")


def _is_row(value: Any) -> bool:
    """a digest, or a list of a digest, a norm and sums"""
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or len(value) != 2 + SKETCHES:
        return False
    digest, *numbers = value
    return isinstance(digest, str) and all(n is None or type(n) is float for n in numbers)
