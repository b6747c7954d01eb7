"""Ready-made reward functions, named in rewards.functions as `spmdrl.rewards.graders:NAME`.

    exact         1 if the answer equals the reference as text
    numeric       1 if its last number equals the reference's
    math          1 if it is mathematically equal, by math-verify
    code          tests passed by a program in the response, in a sandbox
    think_format  1 for `<think>...</think> answer`
    matches       1 if the whole response matches a regular expression
    length        1 within a range of tokens, less outside

The first three report the answer that they read as `pred`, beside the `score`: evaluations take
votes among these (maj@n). A response without an answer reports `[INVALID]`, which is wrong.
The reference answer comes from the row's `reward_model.ground_truth`, `ground_truth` or `answer`.
Keyword-only parameters are options. To set them, bind them in a file of your own:

    # my_rewards.py
    from functools import partial
    from spmdrl.rewards import graders
    boxed_number = partial(graders.numeric, where="boxed", tolerance=1e-3)

    --rewards.functions my_rewards.py:boxed_number
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.rewards.answers import boxed, find_answer, last_number, reference_answer, reported
from spmdrl.rewards.forked import run_forked
from spmdrl.rewards.programs import code

__all__ = ["code", "exact", "length", "matches", "math", "numeric", "think_format"]

_THINK = r"\s*+<think>(?:(?!</?think>).)*+</think>\s*+(?:(?!</?think>).)++"

_MAX_PRED_CHARS = 500
_PLAIN = re.compile(r"-?(?:\\[dt]?frac)?[\d{},./ -]{1,40}")  # no power, no factorial


def exact(
    data_source: str | None,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    *,
    where: str = "all",
    ignore_case: bool = False,
) -> dict[str, Any]:
    """Reward an answer that equals the reference, apart from space around it.

    Args:
        where: the answer is `all` of the response, or stands in its last `boxed`, after its last
            #### (`hashes`) or in its last <answer> (`tag`); the reference is then read so too
            where it has such marks.
        ignore_case: compare without case.
    """
    given = find_answer(solution_str, where=where)
    right = str(ground_truth).strip() if where == "all" else reference_answer(ground_truth)
    if given is not None and ignore_case:
        given = given.casefold()
        right = right.casefold()
    return reported(float(given == right), pred=given)


def numeric(
    data_source: str | None,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    *,
    where: str = "all",
    tolerance: float = 1e-6,
) -> dict[str, Any]:
    """Reward an answer whose last number equals the reference's last number.

    Read are thousands separators (1,234), exponents, fractions (3/4, \\frac{3}{4}) and percent;
    50% equals 50% and, where only one of the two has the sign, 0.5 and 50. References may be like
    GSM8K's `... #### 72`.

    Args:
        where: as of `exact`.
        tolerance: of the difference, relative to the reference, or to 1 if that is less.
    Raises: Refusal when the reference holds no number.
    """
    right = last_number(reference_answer(ground_truth))
    if right is None:
        raise Refusal(f"the reference answer {ground_truth!r:.80} holds no number")
    answer = find_answer(solution_str, where=where)
    given = None if answer is None else last_number(answer)
    if given is None:
        return reported(0.0, pred=None)
    return reported(float(given.equals(right, tolerance=tolerance)), pred=str(given))


def math(
    data_source: str | None,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    *,
    where: str = "all",
    timeout_s: float = 5.0,
) -> dict[str, Any]:
    """Reward an answer that is mathematically equal to the reference, by math-verify.

    Both may hold LaTeX (`\\boxed{...}` comes first) or plain expressions. A response that takes
    too long or too much memory to compare (9^9^9^9) is wrong: it is read in a process of its own.

    Args:
        where: as of `exact`; `all` lets math-verify find it.
        timeout_s: wall-clock seconds for one response; keep it below rewards.timeout_s.
    Raises: Refusal when the reference cannot be read as mathematics, or math-verify is absent.
    """
    right = _read_reference(str(ground_truth))
    given = find_answer(solution_str, where=where)
    if given is None:
        return reported(0.0, pred=None)
    if where != "all":
        given = f"\\boxed{{{given}}}"
    if given.count("\\boxed") == 1 and _PLAIN.fullmatch(boxed(given) or ""):
        is_right, pred = _judged(right, f"\\boxed{{{boxed(given)}}}")  # 2 ms; forked 10
    else:
        text = run_forked(lambda: json.dumps(_judged(right, given)), timeout_s=timeout_s)
        is_right, pred = json.loads(text) if text else (False, "")
    return reported(float(is_right), pred=pred)


_COMMAND = re.compile(r"\\(text|mathrm|mbox)\{[^}]*(?:\}|\Z)|\\[A-Za-z]+")


@functools.lru_cache(maxsize=1024)  # the samples of a group have one
def _read_reference(text: str) -> tuple:
    parse = _math_verify().parse
    # Without marks math-verify reads the last number of a text: 3 of `3\sqrt{13}`, 5 of `6 - 5i`.
    is_marked = re.search(r"(?<!\\)\$|\\boxed|\\\(|\\\[", text) is not None
    is_prose = re.search("[A-Za-z]{3,}", _COMMAND.sub("", text)) is not None
    right = [] if is_marked or is_prose else parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    right = right or parse(text, parsing_timeout=None)
    if not right and "\\" in text and not is_marked:
        right = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    if not right:
        raise Refusal(f"the reference answer {text!r:.80} cannot be read as mathematics")
    return tuple(right)


def _judged(right: tuple, given: str) -> tuple[bool, str]:
    """Return whether a response is right, and its answer: empty where it has none."""
    verifier = _math_verify()
    # Its own timeouts use SIGALRM, which does not end a long power.
    read = verifier.parse(given, parsing_timeout=None)
    is_right = verifier.verify(list(right), read, timeout_seconds=None)
    # As sympy writes it: 1/2 for every way to write it as a fraction.
    return is_right, str(read[0])[:_MAX_PRED_CHARS] if read else ""


def _math_verify() -> Any:
    hint = "; pip install 'math-verify[antlr4_13_2]'"
    with refusing("the grader `math` needs math-verify", ImportError, hint=hint):
        return importlib.import_module("math_verify")


def _prepare_math(**_: Any) -> None:
    # The first use imports sympy and its grammars: seconds that are not the sample's.
    # math-verify warns that its timeouts are off, once per process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _judged(_read_reference("0.5"), "$\\frac{1}{2}$")


vars(math)["prepare"] = _prepare_math

# They compute: more workers make them faster, more threads do not.
for _grader in (math, code):
    vars(_grader)["concurrency"] = 1


def think_format(
    data_source: str | None,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict | None = None,
) -> float:
    """Reward a response of the form `<think>...</think> answer`, each tag once."""
    return matches(data_source, solution_str, pattern=_THINK)


def matches(
    data_source: str | None,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict | None = None,
    *,
    pattern: str,
) -> float:
    """Reward a response that matches a regular expression as a whole; `.` is any character.

    Args:
        pattern: to be bound, as the head of this file shows.
    """
    return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)


def length(
    completions: list,
    completion_ids: list[list[int]],
    *,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    slack_tokens: int = 0,
) -> list[float]:
    """Reward responses of at least `min_tokens` and at most `max_tokens` sampled tokens with 1.

    Outside the reward falls to 0 in a straight line over `slack_tokens`, at once if that is 0.
    `rewards.shaping` has penalties for overlong responses besides.
    """
    rewards = []
    for tokens in completion_ids:
        over = 0 if max_tokens is None else len(tokens) - max_tokens
        away = max(0, min_tokens - len(tokens), over)
        rewards.append(max(0.0, 1.0 - away / (slack_tokens + 1)) if away <= slack_tokens else 0.0)
    return rewards
