"""One line of a proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["proved", "refused", "WRONG"]


@dataclass(frozen=True)
class Line:
    """One thing that was asked of a model, and the answer."""

    name: str
    verdict: Verdict
    note: str
    """What was measured, or why it is refused or wrong."""
    seconds: float
    kind: str = ""
    """Of a stream into an engine: traced or reload."""

    def __str__(self) -> str:
        says = f"{self.verdict}: {self.note}" if self.note else self.verdict
        return f"{self.name:<24} {says}  ({self.seconds:.1f} s)"
