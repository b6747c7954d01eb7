"""The comparison of two certificates, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.certificate.compare import NumberDifference, SequencePlace, step_differences
from spmdrl.certificate.lines import Certified, has_norms
from spmdrl.checkpoint.restore import may_change
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.rollout.recordings import find_recorded, ranges, read_table
from spmdrl.same_run.differences import Difference, differences, is_among

ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Up to which deviation two layouts count as equal, by model.compute_dtype: how far apart the same
gradients are under another order of sums, with room; see docs/reproducibility.md."""
_ROUNDS = (
    "layout.",
    "model.memory.",
    "batch.tokens_per_microbatch",
    "engine.max_num_seqs",
    "engine.max_batched_tokens",
)
"""Fields of the config that change the order of sums alone."""
_ROUNDED = ("rollout_logprobs",)
"""Rollouts that an engine computes; all others are drawn, counted or rewarded."""
_PLACED = ("microbatches", "tokens_per_microbatch")
"""Entries of the plan that another layout changes by itself."""
_RECORDED = ("tokens", "rollout_logprobs")
_SHOWN = 12
"""Rows of the table of deviations."""


def shapes(one: Difference, *, schedule: str) -> bool:
    """Return whether what two runs are made of changes their result, by more than rounding.

    Args:
        schedule: optimizer.schedule of the runs.
    """
    if one.section == "config":
        return not is_among(one.name, may_change(schedule))
    return one.section != "machine"


def rounds(one: Difference) -> bool:
    """Return whether it changes the order of sums, or the kernels that add up, and no more."""
    return one.section == "machine" or is_among(one.name, _ROUNDS)


def is_rounding(one: NumberDifference, *, tolerance: float) -> bool:
    """Return whether another layout explains a difference: by another order of sums, or because
    it is one of the layout itself."""
    if one.section == "before":  # the `after` of the step before says how far apart it is
        return True
    if one.section == "plan":
        return one.name in _PLACED
    if one.section == "rollouts" and one.name not in _ROUNDED:
        return False
    # Digests alone do not tell: the next step with norms says how far apart it is.
    return one.deviation is None or one.deviation <= tolerance


@dataclass
class Comparison:
    """The differences of two runs."""

    steps: list[int]
    """Certified in both, ascending."""
    causes: list[Difference]
    """Of what the runs are made of: those that shape the result."""
    settings: list[Difference]
    """Of what the runs are made of: those that change the order of sums alone."""
    first: tuple[int, NumberDifference] | None = None
    """The first number that differs by more than rounding, and its step."""
    token: str = ""
    """The first token of that number that differs, where recordings have it."""
    largest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """{tensor: largest deviation and its step}, up to the first that differs."""
    measured: list[int] = field(default_factory=list)
    """Steps of which both have norms, ascending."""
    is_rounded: bool = False
    """Whether anything was explained by rounding."""
    unmeasured: list[int] = field(default_factory=list)
    """Steps in which digests differ and norms are missing, so nothing says how far apart they are;
    ascending."""

    @property
    def are_equal(self) -> bool:
        """Whether they are, at least to rounding."""
        return not self.first and not self.causes

    def note(self, one: NumberDifference, step: int) -> None:
        """Keep what rounding explains, where it is the tensor's largest deviation so far."""
        self.is_rounded = True
        apart = one.deviation
        if apart is None and step not in self.unmeasured:
            self.unmeasured.append(step)
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
        if self.is_rounded and self.measured != self.steps:
            count += f", of which {ranges(self.measured) or 'none'} with norms"
        if self.are_equal:
            yield f"equal {how}: {count}"
        else:
            yield f"differ: {_pair(self.causes[0]) if self.causes else self._of_first()}"
        yield from (f"  also: {_pair(one)}" for one in self.causes[1:])
        if self.causes:
            equal = f"equal {how} in {count}"
            yield f"  the numbers: {self._of_first() if self.first else equal}"
        yield from (f"  of rounding alone: {_pair(one)}" for one in self.settings)
        if self.unmeasured:
            yield (
                f"  not compared: steps {ranges(self.unmeasured)}: digests differ there, and "
                "without norms (report.certificate_norms) nothing says by how much; the steps with "
                "norms agree but for rounding"
            )
        if self.largest:
            yield from self._table()

    def check_end(self, a: Certified, b: Certified) -> None:
        """Raise Refusal for runs whose last compared steps differ by an unknown amount."""
        last = max(self.measured, default=-1)
        unknown = [step for step in self.unmeasured if step > last]
        if self.first or not unknown:
            return
        known = f"; up to step {last} they agree but for rounding" if self.measured else ""
        causes = "; ".join(map(_pair, self.settings))
        raise Refusal(
            f"{a.run} and {b.run} cannot be compared in steps {ranges(unknown)}{known}: digests "
            f"differ there, which rounding may explain ({causes}), and the lines have no norms by "
            "which to tell. Compare runs of one machine and layout, or certify with "
            "report.certificate_norms 1"
        )

    def _of_first(self) -> str:
        assert self.first
        step, one = self.first
        before = [known for known in self.steps if known < step]
        gap = ""
        if before and before[-1] < step - 1:
            gap = f"; steps {before[-1] + 1} to {step - 1} are not certified: it may begin there"
        known = [known for known in self.measured if known < step]
        if self.is_rounded and one.deviation is not None and known and known[-1] < step - 1:
            gap = f"; steps {known[-1] + 1} to {step - 1} have no norms: it may begin there"
        token = f", {self.token}" if self.token else ""
        return f"step {step}: {one}{token}{gap}"

    def _table(self) -> Iterator[str]:
        rows = sorted(self.largest.items(), key=lambda row: -row[1][0])
        width = max(len(what) for what, _ in rows[:_SHOWN])
        yield f"  {'largest deviations, as a share of the norm':{width}}  step"
        for what, (apart, step) in rows[:_SHOWN]:
            yield f"  {what:{width}}  {step:4}  {apart:.1e}"
        if len(rows) > _SHOWN:
            yield f"  and {len(rows) - _SHOWN} more"


def _pair(one: Difference) -> str:
    return f"{one.what}: {one.there} and {one.now}"


def compared(a: Certified, b: Certified, *, rounding: float | None = None) -> Comparison:
    """Compare two runs up to the first step in which numbers differ.

    Args:
        rounding: deviation up to which two layouts count as equal; None: by the compute dtype.
    Raises: Refusal when no step is certified in both; when two machines or layouts differ in the
        last steps, which have no norms.
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
    causes = [one for one in made.values() if shapes(one, schedule=schedule)]
    settings = [one for one in made.values() if one not in causes and rounds(one)]
    found = Comparison(steps, causes, settings)
    found.measured = [s for s in steps if has_norms(a.steps[s]) and has_norms(b.steps[s])]
    tolerance = ROUNDING[own["model.compute_dtype"]] if rounding is None else rounding
    for step in steps:
        for one in step_differences(a.steps[step], b.steps[step]):
            if not (found.settings and is_rounding(one, tolerance=tolerance)):
                found.first = step, one
                found.token = first_token((a.run, b.run), one.place, step=step)
                return found
            found.note(one, step)
    found.check_end(a, b)
    return found


def first_token(runs: Sequence[Path], at: SequencePlace | None, *, step: int) -> str:
    """Return the first token of a sequence in which two runs' recordings differ, for people; empty
    where they have none of it."""
    if at is None or at.column not in _RECORDED or len({*runs}) < 2:
        return ""
    one, other = (attempt(partial(_recorded, run, at, step=step))[0] or [] for run in runs)
    if not one or not other:
        return ""
    for number, (x, y) in enumerate(zip(one, other)):
        if x != y:
            return f"token {number}: {x} and {y}"
    return f"{len(one)} and {len(other)} tokens" if len(one) != len(other) else ""


def _recorded(run: Path, at: SequencePlace, *, step: int) -> list[Any]:
    """Return a column of a recorded sequence; [] where there is none."""
    for path in find_recorded(run).files_of(step):
        table = read_table(path, columns=["group", "sample", at.column], group=at.group)
        for row in table.to_pylist():
            if row["sample"] == at.sample:
                return list(row[at.column])
    return []
