"""Where in a batch two steps differ: the sequence, its reward, and its first token that does."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from spmdrl.certificate.lines import Line
from spmdrl.imports import attempt
from spmdrl.rollout.recordings import find_recorded, read_table

_COLUMNS = {
    ("rollouts", "tokens"): "tokens",
    ("rollouts", "rollout_logprobs"): "rollout_logprobs",
    ("rollouts", "rewards"): "rewards",
    ("advantages", "advantages"): "advantages",
}
"""{section and name: column of a line's `sequences`}."""
_RECORDED = ("tokens", "rollout_logprobs")


@dataclass(frozen=True)
class SequencePlace:
    """The first sequence in which something differs."""

    column: str
    group: int
    sample: int
    count: int
    """Sequences that differ."""
    values: tuple[Any, ...] = ()
    """Of rewards the two."""

    def __str__(self) -> str:
        others = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"group {self.group}, sample {self.sample}{others}"


def place(a: Line, b: Line, *, section: str, name: str) -> SequencePlace | None:
    """Return the first sequence in which two certified steps differ in a column; None where lines
    do not say."""
    column = _COLUMNS.get((section, name), "")
    one, other = (line.get("sequences", {}) for line in (a, b))
    if not (column in one and column in other):
        return None
    digests = [numpy.frombuffer(base64.b64decode(own[column]), numpy.int64) for own in (one, other)]
    ids = _ids(one, len(digests[0]))
    others = _ids(other, len(digests[1]))
    if not numpy.array_equal(ids, others):
        return None  # other sequences: of their numbers the lines say so
    rows = numpy.flatnonzero(digests[0] != digests[1])
    if not len(rows):
        return None
    values = tuple(float(own.view(numpy.float64)[rows[0]]) for own in digests)
    group, sample = ids[rows[0]].tolist()
    return SequencePlace(column, group, sample, len(rows), values if column == "rewards" else ())


def _ids(sequences: dict[str, Any], count: int) -> numpy.ndarray:
    """Return [S, 2], each sequence's group and sample."""
    if "group_size" in sequences:
        return numpy.stack(numpy.divmod(numpy.arange(count), sequences["group_size"]), axis=1)
    own = [base64.b64decode(sequences[name]) for name in ("groups", "samples")]
    return numpy.stack([numpy.frombuffer(text, numpy.int32) for text in own], axis=1)


def first_token(runs: Sequence[Path], at: SequencePlace | None, *, step: int) -> str:
    """Return the first token of a sequence in which two runs' recordings differ, for people; empty
    where they have none of it."""
    if at is None or at.column not in _RECORDED or len({*runs}) < 2:
        return ""
    rows = [attempt(partial(_recorded, run, at, step=step))[0] for run in runs]
    if not all(rows):
        return ""
    one, other = rows
    assert one and other
    for number, (x, y) in enumerate(zip(one, other)):
        if x != y:
            return f"token {number}: {x} and {y}"
    return f"{len(one)} and {len(other)} tokens" if len(one) != len(other) else ""


def _recorded(run: Path, at: SequencePlace, *, step: int) -> list[Any]:
    for path in find_recorded(run).files_of(step):
        table = read_table(path, columns=["group", "sample", at.column], group=at.group)
        rows = zip(*(table[name].to_pylist() for name in ("group", "sample", at.column)))
        for group, sample, values in rows:
            if (group, sample) == (at.group, at.sample):
                return list(values)
    return []
