"""The form of a line of a certificate: its sections, and the type of each value.

A seal shows that a line has not changed since it was sealed. It does not show who wrote the line,
because anybody can compute a seal. So each line is also checked against this form.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import partial
from typing import Any

from spmdrl.certificate.fingerprint_collector import SECTIONS
from spmdrl.certificate.fingerprints import SKETCHES
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.value_forms import are_texts, check_values, is_count, is_object, is_text

Line = dict[str, Any]
FORMAT = 3
_SEQUENCE_BYTES = {
    "tokens": 8,
    "rollout_logprobs": 8,
    "advantages": 8,
    "rewards": 8,
    "groups": 4,
    "samples": 4,
    "traces": 4,
}
"""{column of `sequences`: bytes of each sequence}."""
_DTYPES = ("bfloat16", "float16", "float32")


def problem_of(line: Line) -> str:
    """Return the problem of a line, with the field; empty if there is none."""
    if line.get("format") != FORMAT:
        return (
            f"is of format {line.get('format', 'unknown')}, and this program reads {FORMAT}: "
            "compare it with the version of the program that wrote it"
        )
    _, error = attempt(lambda: _check(line))
    return str(error or "")


def _check(line: Line) -> None:
    """Raise Refusal for the first value that is missing or has another form."""
    check_values(line, {"step": is_count})
    if "made_of" in line:
        check_values(line, {"made_of": is_object})
        _check_made_of(line["made_of"])
        return
    check_values(line, dict.fromkeys((*SECTIONS, "sequences"), is_object))
    for section in SECTIONS:
        is_right = _is_measure if section in ("losses", "norms") else _is_row
        forms = dict.fromkeys(line[section], is_right)
        if section == "plan":
            forms["tokens_per_microbatch"] = is_count
        check_values(line[section], forms, within=section)
    _check_sequences(line["sequences"])
    check_values({"differing_copies": [], **line}, {"differing_copies": are_texts})


def _check_made_of(made: Mapping[str, Any]) -> None:
    within = "made_of"
    sections = ("config", "packages", "code", "data", "machine")
    check_values(made, dict.fromkeys(sections, is_object), within=within)
    fields = {
        "report.certificate": is_count,
        "steps": is_count,
        "optimizer.schedule": is_text,
        "model.compute_dtype": _is_dtype,
    }
    check_values(made["config"], fields, within=f"{within}.config")
    for section in ("packages", "code", "data"):
        check_values(
            made[section], dict.fromkeys(made[section], is_text), within=f"{within}.{section}"
        )


def _check_sequences(sequences: Mapping[str, Any]) -> None:
    within = "sequences"
    needed = {"rewards"}
    if "group_size" in sequences:
        check_values(sequences, {"group_size": _is_positive}, within=within)
    else:
        needed |= {"groups", "samples"}
    columns = [name for name in _SEQUENCE_BYTES if name in needed or name in sequences]
    check_values(sequences, dict.fromkeys(columns, is_text), within=within)
    counts = {}
    for name in columns:
        width = _SEQUENCE_BYTES[name]
        text = sequences[name]
        data, _ = attempt(partial(base64.b64decode, text, validate=True), ValueError)
        if data is None or len(data) % width:
            raise Refusal(
                f"{within}.{name} is {text!r:.60}, which is not base64 of values of {width} bytes"
            )
        counts[name] = len(data) // width
    if len({*counts.values()}) > 1:
        raise Refusal(f"{within} holds columns of different lengths: {counts}")


def _is_positive(value: Any) -> bool:
    """a whole number, at least 1"""
    return is_count(value) and value > 0


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
