"""A reward for sums that may begin with dots: `....46`; see recipes.py."""

from __future__ import annotations

from typing import Any


def after_dots(
    data_source: str | None, solution_str: str, ground_truth: Any, extra_info: dict | None = None
) -> dict[str, float]:
    """Reward the right sum after any number of dots, and report the length of right and wrong
    responses."""
    is_right = solution_str.lstrip(".").strip() == str(ground_truth)
    kind = "right_length" if is_right else "wrong_length"
    return {"score": float(is_right), kind: float(len(solution_str))}
