"""Every metric: unit, estimator, denominator, meaning, and its names in verl and TRL.

They are read from `metrics.md` in this folder, which has a row for each.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from spmdrl.errors import Refusal
from spmdrl.types import Sums, as_pair

PAGE = Path(__file__).with_name("metrics.md")


class Metric(NamedTuple):
    """The description of a metric."""

    unit: str
    estimator: str
    """How the value of a step is computed. `total` is a count or amount that adds up over ranks:
    its value is the numerator alone."""
    denominator: str
    """What a mean is taken over, counted over all ranks."""
    description: str


def _rows() -> list[list[str]]:
    """Return the cells of the page's table: name, fields of Metric, names in verl and in TRL."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            name, *metric, verl, trl = [cell.strip().replace(r"\|", "|") for cell in cells]
            rows.append([name[1:-1], *metric, verl[1:-1], trl[1:-1]])
    return rows


GLOSSARY: dict[str, Metric] = {}
ALIASES: dict[str, dict[str, str]] = {"none": {}, "verl": {}, "trl": {}}
"""{system: {our name: its name}}, only for metrics with the same definition."""

for _name, *_metric, _verl, _trl in _rows():
    GLOSSARY[_name] = Metric(*_metric)
    if _verl:
        ALIASES["verl"][_name] = _verl
    if _trl:
        ALIASES["trl"][_name] = _trl


def lookup(name: str) -> Metric:
    """Return the glossary's entry of a metric.

    Raises: Refusal for an unknown metric, with the nearest known one.
    """
    if (metric := _entry(name)) is None:
        raise Refusal(f"metric {name!r} {unknown(name)}")
    return metric


def unknown(name: str) -> str:
    """Return why a metric cannot have this name, as text after it; empty if it can."""
    if _entry(name):
        return ""
    near = difflib.get_close_matches(name, list(GLOSSARY), n=1)
    hint = f"did you mean {near[0]}? Or " if near else ""
    own = name.rpartition("/")[2] or "NAME"
    return (
        f"is not in the glossary; {hint}call one of your own my/{own}, which needs no entry there "
        "(spmdrl/report/metrics.md)"
    )


def _entry(name: str) -> Metric | None:
    patterns = (pattern for pattern in GLOSSARY if "<" in pattern and _matches(name, pattern))
    return GLOSSARY.get(name) or next((GLOSSARY[pattern] for pattern in patterns), None)


def _matches(name: str, pattern: str) -> bool:
    head, tail = re.split(r"<\w+>", pattern)
    return name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)


def clean_name(name: str) -> str:
    """Return a metric name with the characters that trackers refuse replaced by `_`."""
    return re.sub(r"[^\w./:-]", "_", name, flags=re.ASCII)


def values_of(sums: Sums) -> dict[str, float]:
    """Return {clean name: numerator / denominator}; for totals, the numerator.

    A mean over nothing has no value: with denominator 0 the metric is left out.
    Raises: Refusal for a metric that is not in the glossary, TypeError for one that is no pair.
    """
    values = {}
    for given, pair in sums.items():
        name, (numerator, denominator) = clean_name(given), as_pair(given, pair)
        if lookup(name).estimator == "total":
            values[name] = float(numerator)
        elif denominator != 0:
            values[name] = float(numerator) / float(denominator)
    return values


def with_aliases(values: dict[str, float], system: str) -> dict[str, float]:
    """Return the values, and the same values under verl's or TRL's names if these exist."""
    names = ALIASES[system]
    return values | {names[name]: value for name, value in values.items() if name in names}
