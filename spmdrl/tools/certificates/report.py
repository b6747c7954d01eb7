"""Compare two certificates, and describe the result for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.certificate.compare import NumberDifference, SequencePlace, step_differences
from spmdrl.certificate.lines import RunCertificate, has_norms
from spmdrl.checkpoint.restore import may_change
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.rollout.recordings import find_recorded, ranges, read_table
from spmdrl.same_run.differences import Difference, differences, is_among

ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""{model.compute_dtype: largest deviation at which two layouts count as equal}. It is above the
differences that another order of sums gives; see docs/reproducibility.md."""
_ROUNDING_FIELDS = (
    "layout.",
    "model.memory.",
    "batch.share_prefixes",
    "batch.tokens_per_microbatch",
    "engine.max_num_seqs",
    "engine.max_batched_tokens",
)
"""Fields of the config that change only the order of sums."""
_ROUNDED_COLUMNS = ("rollout_logprobs",)
"""Columns of rollouts with numbers that an engine computes, and may round differently."""
_LAYOUT_ENTRIES = ("microbatches", "tokens_per_microbatch")
"""Entries of the plan that differ between layouts."""
_RECORDED_COLUMNS = ("tokens", "rollout_logprobs")
_NUM_ROWS = 12
"""Rows of the table of deviations."""


def changes_result(one: Difference, *, schedule: str) -> bool:
    """Return whether a difference in what two runs are made of changes more than rounding.

    Args:
        schedule: optimizer.schedule of the runs.
    """
    if one.section == "config":
        return not is_among(one.name, may_change(schedule))
    return one.section != "machine"


def changes_rounding(one: Difference) -> bool:
    """Return whether a difference changes only the order of sums, or the kernels that add up."""
    return one.section == "machine" or is_among(one.name, _ROUNDING_FIELDS)


def is_rounding(one: NumberDifference, *, tolerance: float) -> bool:
    """Return whether another layout explains a difference between numbers.

    It does for sums in another order, and for entries that describe the layout.
    """
    if one.section == "before":  # the section `after` of the previous step has the deviation
        return True
    if one.section == "plan":
        return one.name in _LAYOUT_ENTRIES
    if one.section == "rollouts" and one.name not in _ROUNDED_COLUMNS:
        return False
    # Without norms the deviation is unknown; the next step with norms will have it.
    return one.deviation is None or one.deviation <= tolerance


@dataclass
class Comparison:
    """The differences of two runs."""

    steps: list[int]
    """Steps that both have certified, ascending."""
    causes: list[Difference]
    """Differences in what the runs are made of that change more than rounding."""
    settings: list[Difference]
    """Differences in what the runs are made of that change only the order of sums."""
    first: tuple[int, NumberDifference] | None = None
    """The first number that differs by more than rounding, and its step."""
    token: str = ""
    """The first token of that number that differs, if there are recordings."""
    largest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """{tensor: largest deviation and its step}, before the first difference."""
    with_norms: list[int] = field(default_factory=list)
    """Steps for which both have norms, ascending."""
    is_rounded: bool = False
    """Whether rounding explained any difference."""
    without_norms: list[int] = field(default_factory=list)
    """Steps whose digests differ but that have no norms, so the deviation is unknown; ascending."""

    @property
    def are_equal(self) -> bool:
        """Whether the runs are equal, or differ only by rounding."""
        return not self.first and not self.causes

    def add_rounding(self, one: NumberDifference, step: int) -> None:
        """Record a difference that rounding explains."""
        self.is_rounded = True
        apart = one.deviation
        if apart is None and step not in self.without_norms:
            self.without_norms.append(step)
        if apart is None or apart == float("inf") or one.section in ("before", "plan"):
            return
        if apart > self.largest.get(one.what, (0.0, 0))[0]:
            self.largest[one.what] = apart, step

    def text(self) -> str:
        """Return the comparison for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = f"{len(self.steps)} certified steps ({ranges(self.steps)})"
        how = "to rounding" if self.is_rounded else "bit for bit"
        if self.is_rounded and self.with_norms != self.steps:
            count += f", of which {ranges(self.with_norms) or 'none'} with norms"
        if self.are_equal:
            yield f"equal {how}: {count}"
        else:
            yield f"differ: {_difference_text(self.causes[0]) if self.causes else self._of_first()}"
        yield from (f"  also: {_difference_text(one)}" for one in self.causes[1:])
        if self.causes:
            equal = f"equal {how} in {count}"
            yield f"  the numbers: {self._of_first() if self.first else equal}"
        yield from (f"  only rounding: {_difference_text(one)}" for one in self.settings)
        if self.without_norms:
            yield (
                f"  not compared: steps {ranges(self.without_norms)}: digests differ there, and "
                "without norms (report.certificate_norms) the deviation is unknown; the steps with "
                "norms agree up to rounding"
            )
        if self.largest:
            yield from self._table()

    def check_end(self, a: RunCertificate, b: RunCertificate) -> None:
        """Raise Refusal if the last steps differ and their deviation is unknown."""
        last = max(self.with_norms, default=-1)
        unknown = [step for step in self.without_norms if step > last]
        if self.first or not unknown:
            return
        known = f"; to step {last} they agree up to rounding" if self.with_norms else ""
        causes = "; ".join(map(_difference_text, self.settings))
        raise Refusal(
            f"{a.run} and {b.run} cannot be compared in steps {ranges(unknown)}{known}: digests "
            f"differ there. Rounding may explain it ({causes}), but the lines have no norms to "
            "decide that. Compare runs of the same machine and layout, or certify with "
            "report.certificate_norms 1"
        )

    def _of_first(self) -> str:
        assert self.first
        step, one = self.first
        before = [known for known in self.steps if known < step]
        gap = ""
        if before and before[-1] < step - 1:
            gap = f"; steps {before[-1] + 1} to {step - 1} are not certified, it may begin there"
        known = [known for known in self.with_norms if known < step]
        if self.is_rounded and one.deviation is not None and known and known[-1] < step - 1:
            gap = f"; steps {known[-1] + 1} to {step - 1} have no norms, it may begin there"
        token = f", {self.token}" if self.token else ""
        return f"step {step}: {one}{token}{gap}"

    def _table(self) -> Iterator[str]:
        rows = sorted(self.largest.items(), key=lambda row: -row[1][0])
        width = max(len(what) for what, _ in rows[:_NUM_ROWS])
        yield f"  {'largest deviations, as a share of the norm':{width}}  step"
        for what, (apart, step) in rows[:_NUM_ROWS]:
            yield f"  {what:{width}}  {step:4}  {apart:.1e}"
        if len(rows) > _NUM_ROWS:
            yield f"  and {len(rows) - _NUM_ROWS} more"


def _difference_text(one: Difference) -> str:
    return f"{one.what}: {one.there} and {one.now}"


def compare_runs(
    a: RunCertificate, b: RunCertificate, *, rounding: float | None = None
) -> Comparison:
    """Compare two runs up to the first step in which numbers differ.

    Args:
        rounding: deviation up to which two layouts count as equal; None: by the compute dtype.
    Raises: Refusal if no step is certified in both, or if the runs are of two machines or layouts
        and differ in the last steps, which have no norms.
    """
    steps = [step for step in a.steps if step in b.steps]
    if not steps:
        raise Refusal(
            f"no step is certified in both: {a.run} has {ranges(a.steps)}, {b.run} has "
            f"{ranges(b.steps)}"
        )
    own = a.made_at(steps[0])["config"]
    made: dict[str, Difference] = {}
    for step in steps:
        for difference in differences(a.made_at(step), b.made_at(step)):
            made.setdefault(difference.what, difference)
    schedule = own["optimizer.schedule"]
    causes = [one for one in made.values() if changes_result(one, schedule=schedule)]
    settings = [one for one in made.values() if one not in causes and changes_rounding(one)]
    comparison = Comparison(steps, causes, settings)
    comparison.with_norms = [s for s in steps if has_norms(a.steps[s]) and has_norms(b.steps[s])]
    tolerance = ROUNDING[own["model.compute_dtype"]] if rounding is None else rounding
    for step in steps:
        for one in step_differences(a.steps[step], b.steps[step]):
            if not (comparison.settings and is_rounding(one, tolerance=tolerance)):
                comparison.first = step, one
                comparison.token = first_token((a.run, b.run), one.place, step=step)
                return comparison
            comparison.add_rounding(one, step)
    comparison.check_end(a, b)
    return comparison


def first_token(runs: Sequence[Path], at: SequencePlace | None, *, step: int) -> str:
    """Return the first token of a sequence in which the recordings of two runs differ, as text.

    Returns: empty if they have no recording of the sequence.
    """
    if at is None or at.column not in _RECORDED_COLUMNS or len({*runs}) < 2:
        return ""
    one, other = (attempt(partial(_recorded, run, at, step=step))[0] or [] for run in runs)
    if not one or not other:
        return ""
    for number, (x, y) in enumerate(zip(one, other)):
        if x != y:
            return f"token {number}: {x} and {y}"
    return f"{len(one)} and {len(other)} tokens" if len(one) != len(other) else ""


def _recorded(run: Path, at: SequencePlace, *, step: int) -> list[Any]:
    """Return a column of a recorded sequence; [] if it was not recorded."""
    for path in find_recorded(run).files_of(step):
        table = read_table(path, columns=["group", "sample", "trace", at.column], group=at.group)
        for row in table.to_pylist():
            if (row["sample"], row["trace"]) == (at.sample, at.trace):
                return list(row[at.column])
    return []
