"""Ready-made reward functions, named in rewards.functions as `spmdrl.rewards.graders:NAME`.

    exact         1 if the answer equals the reference as text
    numeric       1 if its last number equals the reference's
    math          1 if it is mathematically equal, by math-verify
    code          tests passed by a program in the response, in a sandbox
    think_format  1 for `<think>...</think> answer`
    matches       1 if the whole response matches a regular expression
    length        1 within a range of tokens, less outside

The first three also report the answer that they read, as `pred`: evaluations vote among these
(maj@n). A response without an answer reports `[INVALID]`, which is wrong. The reference answer is
the row's `reward_model.ground_truth`, `ground_truth` or `answer`. Keyword-only parameters are
options. To set them, bind them in a file of your own:

    # my_rewards.py
    from functools import partial
    from spmdrl.rewards import graders
    boxed_number = partial(graders.numeric, where="boxed", tolerance=1e-3)

    --rewards.functions my_rewards.py:boxed_number
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import re
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.rewards.answers import boxed, find_answer, last_number, reference_answer, reported
from spmdrl.rewards.programs import code

__all__ = ["code", "exact", "length", "matches", "math", "numeric", "think_format"]

_THINK = r"\s*+<think>(?:(?!</?think>).)*+</think>\s*+(?:(?!</?think>).)++"

_MAX_PRED_CHARS = 500
_CHILD_MEMORY_BYTES = 4 << 30  # more than this process has
_PIPE_BYTES = 1 << 16
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
            #### (`hashes`) or in its last <answer> (`tag`). Marks in the reference are then read
            too.
        ignore_case: compare without case.
    """
    answer = find_answer(solution_str, where=where)
    right = str(ground_truth).strip() if where == "all" else reference_answer(ground_truth)
    if answer is not None and ignore_case:
        answer = answer.casefold()
        right = right.casefold()
    return reported(float(answer == right), pred=answer)


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

    It reads thousands separators (1,234), exponents, fractions (3/4, \\frac{3}{4}) and percent. 50%
    equals 50%; if only one of the two has the sign, it equals 0.5 and 50. References may be like
    GSM8K's `... #### 72`.

    Args:
        where: see `exact`.
        tolerance: of the difference, relative to the reference, or to 1 if that is less.
    Raises: Refusal when the reference holds no number.
    """
    right = last_number(reference_answer(ground_truth))
    if right is None:
        raise Refusal(f"the reference answer {ground_truth!r:.80} holds no number")
    answer = find_answer(solution_str, where=where)
    number = None if answer is None else last_number(answer)
    if number is None:
        return reported(0.0, pred=None)
    return reported(float(number.equals(right, tolerance=tolerance)), pred=str(number))


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

    Both may hold LaTeX (`\\boxed{...}` comes first) or plain expressions. Responses are read in a
    process of their own, and one that takes too long or too much memory (9^9^9^9) is wrong.

    Args:
        where: see `exact`; `all` lets math-verify find the answer.
        timeout_s: wall-clock seconds for one response; keep it below rewards.timeout_s.
    Raises: Refusal when the reference cannot be read as mathematics, or math-verify is absent.
    """
    right = _read_reference(str(ground_truth))
    answer = find_answer(solution_str, where=where)
    if answer is None:
        return reported(0.0, pred=None)
    if where != "all":
        answer = f"\\boxed{{{answer}}}"
    if answer.count("\\boxed") == 1 and _PLAIN.fullmatch(boxed(answer) or ""):
        # In 2 ms; a child process takes 10 ms.
        is_right, pred = _compare(right, f"\\boxed{{{boxed(answer)}}}")
    else:
        text = _run_in_child(lambda: json.dumps(_compare(right, answer)), timeout_s=timeout_s)
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


def _compare(right: tuple, response: str) -> tuple[bool, str]:
    """Return whether a response is right, and its answer; empty if it has none."""
    verifier = _math_verify()
    # Its own timeouts use SIGALRM, which does not end a long power.
    read = verifier.parse(response, parsing_timeout=None)
    is_right = verifier.verify(list(right), read, timeout_seconds=None)
    # As sympy writes it: 1/2 for every way to write it as a fraction.
    return is_right, str(read[0])[:_MAX_PRED_CHARS] if read else ""


def _math_verify() -> Any:
    hint = "; pip install 'math-verify[antlr4_13_2]'"
    with refusing("the grader `math` needs math-verify", ImportError, hint=hint):
        return importlib.import_module("math_verify")


def _prepare_math(**_: Any) -> None:
    # The first use imports sympy and its grammars, which takes seconds; no sample's deadline should
    # pay for that. math-verify warns once per process that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _compare(_read_reference("0.5"), "$\\frac{1}{2}$")


vars(math)["prepare"] = _prepare_math

# They use the processor, so that more workers make them faster and more threads do not.
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
        pattern: bind it as the beginning of this file shows.
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

    Outside this range the reward falls linearly to 0 over `slack_tokens`, at once if that is 0.
    `rewards.shaping` also has penalties for overlong responses.
    """
    rewards = []
    for tokens in completion_ids:
        over = 0 if max_tokens is None else len(tokens) - max_tokens
        distance = max(0, min_tokens - len(tokens), over)
        rewards.append(max(0.0, 1.0 - distance / (slack_tokens + 1)))
    return rewards


# --------------------------------------------------------------------------- a child process


def _run_in_child(function: Callable[[], str], *, timeout_s: float) -> str | None:
    """Return the text that a function returns; None if it raises, crashes or takes too long.

    The child is a fork. A lock that another thread holds stays locked there, so the function must
    not need one: other threads of a reward worker wait for pipes and sockets.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _limit_memory()
            os.write(writer, function().encode())
        os._exit(0)
    os.close(writer)
    try:
        text = _read_until_closed(reader, end=time.monotonic() + timeout_s)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return text or None


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = used + _CHILD_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read_until_closed(fd: int, *, end: float) -> str:
    """Return what comes through a pipe; empty if it is not closed in time."""
    data = b""
    poller = select.poll()  # not select(), which fails for descriptors above 1023
    poller.register(fd, select.POLLIN)
    while poller.poll(max(0.0, 1000 * (end - time.monotonic()))):
        part = os.read(fd, _PIPE_BYTES)
        if not part:
            return data.decode()
        data += part
    return ""
