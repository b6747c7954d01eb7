"""Ready-made reward functions, in verl's signature: 1.0 for right, 0.0 for wrong.

The reference answer comes from the row's `reward_model.ground_truth`, `ground_truth` or
`answer`.
"""

from __future__ import annotations

import logging
import re
from typing import Any

_NUMBER = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
_THINK = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+", re.DOTALL)


def exact(
    data_source: str | None, solution_str: str, ground_truth: Any, extra_info: dict | None = None
) -> float:
    """Reward a response that equals the reference, apart from space around it."""
    return float(solution_str.strip() == str(ground_truth).strip())


def numeric(
    data_source: str | None, solution_str: str, ground_truth: Any, extra_info: dict | None = None
) -> float:
    """Reward a response whose last number equals the reference's last number (to 1e-6).

    Thousands separators are read (`1,234`), and so are references like GSM8K's `... #### 72`.

    Raises: ValueError when the reference holds no number.
    """
    right = _last_number(str(ground_truth))
    if right is None:
        raise ValueError(f"the reference answer {ground_truth!r:.80} holds no number")
    given = _last_number(solution_str)
    return float(given is not None and abs(given - right) <= 1e-6 * max(1.0, abs(right)))


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def math(
    data_source: str | None, solution_str: str, ground_truth: Any, extra_info: dict | None = None
) -> float:
    """Reward a response that is mathematically equal to the reference, by math-verify.

    Both may hold LaTeX (`\\boxed{...}` comes first) or plain expressions.

    Raises: ValueError when the reference cannot be read as mathematics.
    """
    import math_verify

    # Its own timeouts use SIGALRM and are not needed: the worker has a deadline.
    text = str(ground_truth)
    right = math_verify.parse(text, parsing_timeout=None)
    if not right and "\\" in text and "$" not in text:
        right = math_verify.parse(f"${text}$", parsing_timeout=None)
    if not right:
        raise ValueError(f"the reference answer {text!r:.80} cannot be read as mathematics")
    given = math_verify.parse(solution_str, parsing_timeout=None)
    return float(math_verify.verify(right, given, timeout_seconds=None))


def _prepare_math() -> None:
    # The first use imports sympy and its grammars: seconds that are not the sample's.
    # math-verify warns that its timeouts are off, once per process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math(None, "$\\frac{1}{2}$", "0.5")


math.prepare = _prepare_math


def think_format(
    data_source: str | None, solution_str: str, ground_truth: Any = None,
    extra_info: dict | None = None,
) -> float:
    """Reward a response of the form `<think>...</think> answer`, each tag once."""
    return float(_THINK.fullmatch(solution_str) is not None)
