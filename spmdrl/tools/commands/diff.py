"""Say where two runs begin to differ: the first step, and in it the first number.

    python -m spmdrl diff runs/a runs/b

Both must have a certificate.jsonl (report.certificate, on by default). Exit status: 0 equal, bit
for bit, or on two layouts but for rounding; 1 they differ; 2 they cannot be compared.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.tools.commands import run_command


def diff(
    first: Annotated[Path, tyro.conf.Positional],
    second: Annotated[Path, tyro.conf.Positional],
    *,
    rounding: float | None = None,
) -> tuple[str, int]:
    """Say where two runs begin to differ.

    Args:
        first: output_dir of a run.
        second: the same of another.
        rounding: on two layouts, the deviation of a tensor, as a share of its norm, that the order
            of sums explains; by default by model.compute_dtype.
    Returns: the text to print, and the exit status: 0 where they are equal, else 1.
    Raises: Refusal for a certificate that is not there, was edited or cut, or of other steps.
    """
    from spmdrl.certificate.lines import read
    from spmdrl.tools.certificates.report import compare_runs

    found = compare_runs(read(first), read(second), rounding=rounding)
    return found.text(), 0 if found.are_equal else 1


main = partial(run_command, "diff", diff)
