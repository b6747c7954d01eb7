"""Show which features go together: proved by a test, refused by a rule, or untried.

python -m spmdrl matrix
python -m spmdrl matrix --feature lora
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Literal

from spmdrl.errors import Refusal
from spmdrl.imports import nearest
from spmdrl.tools.commands import run_command


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
        evidence = f": {pair.evidence}" if pair.evidence else ""
        lines.append(f"{pair.first} x {pair.second}: {pair.verdict}{kind}{evidence}")
    counts = Counter(pair.verdict for pair in found)
    total = ", ".join(f"{counts[name]} {name}" for name in ("proved", "refused", "untried"))
    lines.append(f"{len(found)} pairs: {total}. What depends on the model, --dry-run refuses.")
    return "\n".join(lines)


main = partial(run_command, "matrix", matrix)
