"""What a person sees: metrics, console, tracker, log files, curves.

`Report` is looked up on first use: `python -m spmdrl curves` and the other small
commands run without the packages that a training run needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdrl.report.report import Report

__all__ = ["Report"]


def __getattr__(name: str) -> Any:
    if name != "Report":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from spmdrl.report.report import Report

    return Report
