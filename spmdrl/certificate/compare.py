"""Where two runs begin to differ: what they are made with, then step after step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from spmdrl.certificate.fingerprint_collector import SECTIONS
from spmdrl.certificate.fingerprints import deviation, digest_of
from spmdrl.certificate.lines import Line
from spmdrl.certificate.places import SequencePlace, place
from spmdrl.checkpoint.restore import may_change
from spmdrl.same_run.differences import Difference, is_among

ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Up to which deviation two layouts count as equal, by model.compute_dtype: as far apart as the
same gradients come by another order of sums, with room; see docs/reproducibility.md."""
_ROUNDS = (
    "layout.",
    "model.memory.",
    "batch.tokens_per_microbatch",
    "engine.max_num_seqs",
    "engine.max_batched_tokens",
)
"""Fields of the config that change the order of sums alone."""
_ROUNDED = ("rollout_logprobs",)
"""Of the rollouts what an engine computes; all else there is drawn, counted or rewarded."""
_PLACED = ("microbatches", "tokens_per_microbatch")
"""Of the plan what another layout changes by itself."""


@dataclass(frozen=True)
class NumberDifference:
    """A number, or many, in which a step of two runs differs."""

    what: str
    """For people: `gradient of lm_head.weight`."""
    section: str
    name: str
    deviation: float | None = float("inf")
    """As a share of the norm; inf of what is no number, None where digests alone are known."""
    values: tuple[Any, ...] = ()
    """The two, where they are short."""
    place: SequencePlace | None = None
    """The first sequence."""

    def __str__(self) -> str:
        what = f"{self.what} of {self.place}" if self.place else self.what
        values = self.values or (self.place.values if self.place else ())
        if values:
            return f"{what}: {values[0]} and {values[1]}"
        if self.deviation is None or self.deviation == float("inf"):
            return what
        return f"{what}: {self.deviation:.1e} of its norm apart"


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


def step_differences(a: Line, b: Line) -> Iterator[NumberDifference]:
    """Yield in what two certified steps differ, in the order in which the one follows from the
    other."""
    for which, line in (("first", a), ("second", b)):
        for name in line.get("differing_copies", ()):
            section, _, own = name.partition("/")
            what = f"copies on several ranks of the {which} run's {_said(section, own)}"
            yield NumberDifference(what, section, own)
    for section in SECTIONS:
        one = a[section]
        other = b[section]
        for name in [*one, *(name for name in other if name not in one)]:
            pair = one.get(name), other.get(name)
            if not _are_alike(*pair):
                found = _difference(section, name, *pair)
                yield replace(found, place=place(a, b, section=section, name=name))


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two entries are, as far as both say: one may have norms, the other not."""
    if isinstance(one, (list, str)) and isinstance(other, (list, str)):
        return digest_of(one) == digest_of(other)
    return one == other


def _difference(section: str, name: str, one: Any, other: Any) -> NumberDifference:
    what = _said(section, name)
    if isinstance(one, (list, str)) and isinstance(other, (list, str)):
        return NumberDifference(what, section, name, deviation(one, other))
    if isinstance(one, float) and isinstance(other, float):
        # A loss may be 0 but for rounding: its terms are of the size of an advantage.
        apart = abs(one - other) / max(abs(one), abs(other), 1.0)
        return NumberDifference(what, section, name, apart, (one, other))
    if one is None or other is None:
        return NumberDifference(f"{what}, which one of them has alone", section, name)
    return NumberDifference(what, section, name)


def is_rounding(one: NumberDifference, *, tolerance: float) -> bool:
    """Return whether another layout explains a difference: by another order of sums, or since it
    is of the layout itself."""
    if one.section in ("before", "plan"):  # of what was before, the `after` says how far apart
        return one.section == "before" or one.name in _PLACED
    if one.section == "rollouts" and one.name not in _ROUNDED:
        return False
    # Of digests alone nobody knows: the next step with norms says how far it came.
    return one.deviation is None or one.deviation <= tolerance


def _said(section: str, name: str) -> str:
    """Return what a name of a section means, for people."""
    if section in ("before", "after"):
        kind, _, rest = name.partition(".")
        known = {"model": f"weight {rest}", "optimizer": f"optimizer state {rest}"}
        return known.get(kind, f"state {name}") + " before the update" * (section == "before")
    if section in ("advantages", "losses", "norms"):
        return name
    words = {"rollouts": "rollouts'", "plan": "batch plan's", "columns": "column"}
    return f"{words.get(section, 'gradient of')} {name}"
