"""The errors of our own checks, and how errors of the user's code are shown.

It imports nothing of ours, so that every room can use it.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

_PACKAGE = os.path.dirname(os.path.realpath(__file__))
_SHOWN_CHARS = 1000
_LIBRARIES = tuple(
    {_PACKAGE, *(os.path.realpath(sysconfig.get_paths()[n]) for n in ("stdlib", "platstdlib"))}
)


RAISED = (Exception, SystemExit)
"""Errors that the user's code may raise. A sys.exit there counts as one: else it would end the run
as if it were done."""


# Control characters except line feed and tab, line separators, marks that change the direction of
# text, and surrogates, which no stream can encode.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: object) -> str:
    """Return text that cannot control a terminal: control characters become text, `\\x1b`.

    Line feeds and tabs stay. Use it for console output that may hold text of others: of a model, a
    file, a template or a reward.
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], str(text))


def say(text: object, *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print text that may come from others, see `printable`."""
    print(printable(text), file=file, end=end, flush=flush)


def describe(value: object) -> str:
    """Return a short description of a value, for messages."""
    # The text of a deeply nested list, or of an integer of thousands of digits, raises an error.
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**40:
        return "a whole number of over 40 digits"
    if isinstance(value, datetime.date):
        return f"{value}, which YAML reads as a date: put it in quotes to make it a text"
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:120]}... ({len(text)} characters)"


class Refusal(ValueError):
    """A request that cannot be carried out right. The message says what, where, the value seen and
    what to do, and is shown alone. Any other error is shown with its traceback.

    Args:
        message: for people.
        field: field of the config that is wrong; empty where no caller reads it.
    """

    def __init__(self, message: str, *, field: str = ""):
        super().__init__(message)
        self.field = field


class RunFailed(RuntimeError):
    """The run cannot go on, for a reason outside of its code: the message says it, and is shown
    alone."""


class RewardFailed(RunFailed):
    """A reward or an environment failed, in a process of its own: the message says where, and is
    shown alone."""


def error_text(error: BaseException) -> str:
    """Return what was raised and where, in one line: `KeyError: 'x' (mine.py:12, in score; raised
    at .../lib.py:40)`.

    The first place is the last line of the user's code that the error passed, if there is one. For
    a refusal the text is its message, with that line only if the user's code caused it.
    """
    place = users_line(error)
    if isinstance(error, Refusal):
        return f"{error} (asked for at {place})" if place and _is_called_back(error) else str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, SyntaxError):
        raised = f"{frames[-1].filename}:{frames[-1].lineno}"
        if not place:
            place = raised
        elif not place.startswith(f"{raised},"):
            place += f"; raised at {raised}"
    message = message_of(error)
    if len(message) > _SHOWN_CHARS:  # the place stays in sight
        message = f"{message[:_SHOWN_CHARS]} ..."
    if isinstance(error, BaseExceptionGroup):
        message += f", the first of them {error_text(error.exceptions[0])}"
    return f"{type(error).__name__}: {message}" + (f" ({place})" if place else "")


def message_of(error: BaseException) -> str:
    """Return an error's message as text that every stream can encode.

    The user's own error class may fail to make its message.
    """
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as failure:
        return f"(its message cannot be made: {type(failure).__name__})"


def with_line(error: BaseException) -> str:
    """Return `KeyError: 'x' (mine.py:12, in score)`; without a place if no code of the user ran."""
    place = users_line(error)
    return f"{type(error).__name__}: {message_of(error)}" + (f" ({place})" if place else "")


def users_line(error: BaseException) -> str:
    """Return `file:line, in function` of the last line of the user's code that an error passed;
    empty if there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}" if error.filename else ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    if not own:
        return ""
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}"


def place_of(function: Callable[..., Any]) -> str:
    """Return ` (FILE:LINE)` of a function of the user; empty for one of this package."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or _is_in(code.co_filename, (_PACKAGE,)):
        return ""
    return f" ({code.co_filename}:{code.co_firstlineno})"


def users_place(thread: int | None = None) -> str:
    """Return `file:line, in function` of the innermost line of the user's code that a thread is in;
    empty if there is none.

    Args:
        thread: identity of the thread; None is this one.
    """
    # Not traceback.extract_stack, which reads source files: every wait calls this.
    frame = sys._current_frames().get(thread or threading.get_ident())
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return (
        f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}" if frame else ""
    )


def users_traceback(error: BaseException) -> str:
    """Return an error's traceback from the last call of the user's code on, without its callers.

    It is the whole traceback if no code of the user was called.
    """
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    seen = set()
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        begin = _begin(part.stack)
        # Also for each cause or context, which has a stack of its own.
        part.stack = traceback.StackSummary.from_list(list(part.stack)[begin:])
        cause = part.__cause__
        if cause is None and not part.__suppress_context__:
            cause = part.__context__
        part = cause
    return "".join(shown.format())


def _is_called_back(error: BaseException) -> bool:
    """Return whether our code called the user's code that raised this error."""
    return _begin(traceback.extract_tb(error.__traceback__)) > 0


def _begin(frames: traceback.StackSummary) -> int:
    """Return the index of the user's first frame after the last of our frames that called the
    user's code; 0 if our code called none."""
    theirs = [i for i, frame in enumerate(frames) if _is_users(frame.filename)]
    if not theirs:
        return 0
    above = [i for i in range(theirs[-1]) if _is_in(frames[i].filename, (_PACKAGE,))]
    return next(i for i in theirs if i > above[-1]) if above else 0


@functools.cache
def _is_users(filename: str) -> bool:
    # Such as `<string>` and `<frozen importlib._bootstrap>`.
    if filename.startswith("<"):
        return False
    packages = {"site-packages", "dist-packages"}.intersection(filename.split(os.sep))
    return not packages and not _is_in(filename, _LIBRARIES)


def _is_in(filename: str, folders: tuple[str, ...]) -> bool:
    return os.path.realpath(filename).startswith(tuple(f + os.sep for f in folders))
