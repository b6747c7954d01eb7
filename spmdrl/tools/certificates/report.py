"""The comparison of two certificates, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from spmdrl.certificate.compare import (
    ROUNDING,
    NumberDifference,
    is_rounding,
    rounds,
    shapes,
    step_differences,
)
from spmdrl.certificate.lines import Certified, has_norms
from spmdrl.certificate.places import first_token
from spmdrl.errors import Refusal
from spmdrl.rollout.recordings import ranges
from spmdrl.same_run.differences import Difference, differences

_SHOWN = 12
"""Rows of the table of deviations."""


@dataclass
class Comparison:
    """What was found in two runs."""

    steps: list[int]
    """Certified in both, ascending."""
    causes: list[Difference]
    """In what they are made otherwise that shapes the result."""
    settings: list[Difference]
    """The same of what changes the order of sums alone."""
    first: tuple[int, NumberDifference] | None = None
    """The first number that differs, and its step; none that rounding explains."""
    token: str = ""
    """Of that number the first token, where recordings have it."""
    largest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """{tensor: largest deviation and its step}, up to the first that differs."""
    measured: list[int] = field(default_factory=list)
    """Steps of which both have norms, ascending."""
    is_rounded: bool = False
    """Whether anything was explained by rounding."""
    unmeasured: list[int] = field(default_factory=list)
    """Steps in which digests differ and norms are missing, ascending: how far apart they are is not
    known."""

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
        """Return what is to be said."""
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
                f"  not compared: steps {ranges(self.unmeasured)}: digests differ there, and it is "
                "not known by how much without norms (report.certificate_norms); the steps with "
                "norms agree but for rounding"
            )
        if self.largest:
            yield from self._table()

    def check_end(self, a: Certified, b: Certified) -> None:
        """Refuse runs whose last compared steps differ by an amount that nobody knows.

        Raises: Refusal naming these steps, and why their bits may differ.
        """
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
