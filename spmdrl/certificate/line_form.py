"""What a line of a certificate must hold: sections, and the type of each value.

The chain says that lines are as somebody wrote them; anybody can compute it again. So each line is
also checked against this form, and no reader meets a value of another type.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spmdrl.certificate.fingerprint_collector import SECTIONS
from spmdrl.certificate.fingerprints import SKETCHES

Line = dict[str, Any]
FORMAT = 3
_MADE = ("config", "packages", "code", "machine")
_SEQUENCE_BYTES = {"tokens": 8, "rollout_logprobs": 8, "advantages": 8, "rewards": 8}
"""{column of `sequences`: bytes of each sequence}."""
_ID_BYTES = {"groups": 4, "samples": 4}
_DTYPES = ("bfloat16", "float16", "float32")


def problem_of(line: Line) -> str:
    """Return what is wrong with a line, with the field; empty for nothing."""
    if line.get("format") != FORMAT:
        return (
            f"is of format {line.get('format', 'unknown')}, and this program reads {FORMAT}: "
            "compare it by the version of the program that wrote it"
        )
    problems = _problems(line)
    return next(problems, "")


def _problems(line: Line) -> Iterator[str]:
    yield from _check(line, "step", _is_count, "a whole number, at least 0")
    if "made_with" in line:
        yield from _check(line, "made_with", _is_object, "an object")
        yield from _made_problems(line["made_with"])
        return
    for section in (*SECTIONS, "sequences"):
        yield from _check(line, section, _is_object, "an object")
    for section in SECTIONS:
        for name in line[section]:
            is_right, what = _form_of(section, name)
            yield from _check(line[section], name, is_right, what, within=section)
    yield from _check(line["plan"], "tokens_per_microbatch", _is_count, "a count", within="plan")
    yield from _sequence_problems(line["sequences"])
    copies = line.get("differing_copies", [])
    if not isinstance(copies, list) or not all(map(_is_text, copies)):
        yield f"differing_copies is {copies!r:.60}, and must be a list of names"


def _made_problems(made: Mapping[str, Any]) -> Iterator[str]:
    for section in _MADE:
        yield from _check(made, section, _is_object, "an object", within="made_with")
    config = {
        "report.certificate": (_is_count, "a whole number, at least 0"),
        "steps": (_is_count, "a whole number, at least 0"),
        "optimizer.schedule": (_is_text, "a text"),
        "model.compute_dtype": (_DTYPES.__contains__, f"one of {', '.join(_DTYPES)}"),
    }
    for name, (is_right, what) in config.items():
        yield from _check(made["config"], name, is_right, what, within="made_with.config")
    for section in ("packages", "code"):
        for name in made[section]:
            yield from _check(
                made[section], name, _is_text, "a text", within=f"made_with.{section}"
            )


def _sequence_problems(sequences: Mapping[str, Any]) -> Iterator[str]:
    within = "sequences"
    widths = {name: width for name, width in _SEQUENCE_BYTES.items() if name in sequences}
    widths |= {"rewards": _SEQUENCE_BYTES["rewards"]}
    if "group_size" in sequences:
        what = "a whole number, at least 1"
        yield from _check(sequences, "group_size", _is_positive, what, within=within)
    else:
        widths |= _ID_BYTES
    counts = {}
    for name, width in widths.items():
        yield from _check(sequences, name, _is_text, "a text", within=within)
        data = _decoded(sequences[name])
        if data is None or len(data) % width:
            yield f"{within}.{name} is {sequences[name]!r:.60}, no base64 of {width} bytes each"
            return
        counts[name] = len(data) // width
    if len({*counts.values()}) > 1:
        yield f"{within} holds columns of different lengths: {counts}"


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _check(
    values: Mapping[str, Any],
    name: str,
    is_right: Callable[[Any], bool],
    what: str,
    *,
    within: str = "",
) -> Iterator[str]:
    """Yield a problem where a value is missing or of another type."""
    place = f"{within}.{name}" if within else name
    if name not in values:
        yield f"has no {place}"
    elif not is_right(values[name]):
        yield f"holds {values[name]!r:.60} as {place}, which must be {what}"


def _form_of(section: str, name: str) -> tuple[Callable[[Any], bool], str]:
    if section in ("losses", "norms"):
        return _is_measure, "a number, or the text of one that is not finite"
    if (section, name) == ("plan", "tokens_per_microbatch"):
        return _is_count, "a whole number, at least 0"
    return _is_row, f"a digest, or a list of a digest, a norm and {SKETCHES} sums"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_measure(value: Any) -> bool:
    return type(value) is float or value in ("inf", "-inf", "nan")


def _is_row(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or len(value) != 2 + SKETCHES:
        return False
    digest, *numbers = value
    return isinstance(digest, str) and all(n is None or type(n) is float for n in numbers)
