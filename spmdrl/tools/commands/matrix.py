"""Show which features go together: proved by a test, refused by a rule, or untried.

python -m spmdrl matrix
python -m spmdrl matrix --feature lora
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Literal

import tyro

from spmdrl.errors import Refusal, say
from spmdrl.imports import attempt, nearest


def matrix(
    *, feature: str = "", verdict: Literal["all", "proved", "refused", "untried"] = "all"
) -> str:
    """Show which features go together: proved by a test, refused by a rule, or untried.

    Args:
        feature: show the pairs of this one alone.
        verdict: show those with this verdict alone.
    Returns: one line per pair, and a line of counts.
    Raises: Refusal for a feature that is not there.
    """
    from spmdrl.tools.matrix.features import FEATURES
    from spmdrl.tools.matrix.pairs import pairs

    names = [own.name for own in FEATURES]
    if feature and feature not in names:
        raise Refusal(f"--feature {feature}: there is none{nearest(feature, names)}")
    found = [
        pair
        for pair in pairs()
        if feature in ("", pair.first, pair.second) and verdict in ("all", pair.verdict)
    ]
    lines = []
    for pair in found:
        kind = f", {pair.kind}" if pair.kind else ""
        says = f": {pair.says}" if pair.says else ""
        lines.append(f"{pair.first} x {pair.second}: {pair.verdict}{kind}{says}")
    counts = Counter(pair.verdict for pair in found)
    total = ", ".join(f"{counts[name]} {name}" for name in ("proved", "refused", "untried"))
    lines.append(f"{len(found)} pairs: {total}. What depends on the model, --dry-run refuses.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the matrix; return the exit status."""
    text, error = attempt(lambda: tyro.cli(matrix, prog="python -m spmdrl matrix", args=argv))
    say(error or text, file=sys.stderr if error else sys.stdout)
    return 2 if error else 0
