"""What adapters of a model are like: their rank, and the scale of what they add.

Source: arXiv 2106.09685, section 4.1; rank-stabilised scale: 2312.03732.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LoraForm:
    """What adapters of a model are like."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    use_rslora: bool = False
    init: str = "kaiming"
    path: str = ""
    """Folder that they start from; empty: from random numbers."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)
