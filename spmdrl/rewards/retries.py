"""Repeats calls of reward functions after failures that may pass, such as a server's restart.

Reward workers import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
Errors = tuple[type[BaseException], ...]

PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of HTTP that may pass."""
BACKOFF_S = 0.5
_MAX_BACKOFF_S = 8.0
_OF_FILES = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)
_OF_CONNECTIONS = frozenset(
    {
        "aiohttp.ClientError",
        "anthropic.APIConnectionError",
        "http.HTTPException",
        "httpx.TransportError",
        "openai.APIConnectionError",
        "urllib3.HTTPError",
    }
)
"""Errors of HTTP clients that are no OSError, by package and class."""
_MAX_CAUSES = 10
_jitter = random.Random()  # of its own, so that random draws of reward functions do not change


class Retries:
    """Makes the calls of one job, and repeats those that failed in a way that may pass.

    Args:
        most: repeats of each call.
        end: deadline of the job, by time.monotonic(); no wait ends after it.
    """

    def __init__(self, most: int, *, end: float):
        self._most = most
        self._end = end
        self.count = 0
        """Repeated calls."""

    def call(self, function: Callable[[], T], *, transient: Errors = ()) -> T:
        """Return the result of a function.

        Args:
            transient: its own errors that may pass.
        Raises: the error of its last call.
        """
        attempt = 0
        while True:
            try:
                return function()
            except Exception as error:
                wait_s = self._wait_s(error, attempt, transient=transient)
                if wait_s is None:
                    raise
            time.sleep(wait_s)
            attempt += 1
            self.count += 1

    async def call_async(self, function: Callable[[], Awaitable[T]], *, transient: Errors) -> T:
        """Do what `call` does, for a function whose result is awaited."""
        attempt = 0
        while True:
            try:
                return await function()
            except Exception as error:
                wait_s = self._wait_s(error, attempt, transient=transient)
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)
            attempt += 1
            self.count += 1

    def _wait_s(self, error: Exception, attempt: int, *, transient: Errors) -> float | None:
        """Return the seconds to wait before the next call; None if there is none."""
        if attempt >= self._most or not may_pass(error, transient):
            return None
        wait_s = backoff_s(attempt, after=_retry_after(error))
        return wait_s if time.monotonic() + wait_s < self._end else None


def may_pass(error: BaseException, transient: Errors = ()) -> bool:
    """Return whether a call that failed with this error may succeed later.

    It may if the error, or one that it was raised from, is one of `transient`, has an HTTP status
    of PASSING_STATUSES, or is an error of a connection: an OSError that is not about files, or an
    error of a known HTTP client. Any other HTTP status does not pass.
    """
    link: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if link is None:
            return False
        if isinstance(link, transient):
            return True
        status = _status(link)
        if status is not None:
            return status in PASSING_STATUSES
        if _is_of_connection(link):
            return True
        link = link.__cause__
    return False


def backoff_s(attempt: int, *, first_s: float = BACKOFF_S, after: str | None = None) -> float:
    """Return the seconds to wait after a failed try: twice as many each time, with jitter.

    Args:
        attempt: number of the try, from 0.
        after: the reply's Retry-After, which is obeyed if it is a number of seconds.
    """
    wait_s = min(_MAX_BACKOFF_S, first_s * 2**attempt) * _jitter.uniform(0.5, 1.0)
    if after and re.fullmatch(r"\s*\d+(\.\d*)?\s*", after):  # else a date
        return max(wait_s, float(after))
    return wait_s


def _is_of_connection(error: BaseException) -> bool:
    if isinstance(error, ValueError | Warning):  # requests' InvalidURL is an OSError too
        return False
    if isinstance(error, OSError) and not isinstance(error, _OF_FILES):
        return True
    for kind in type(error).__mro__:
        package = kind.__module__.partition(".")[0]
        if f"{package}.{kind.__name__}" in _OF_CONNECTIONS:
            return True
    return False


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of urllib, requests, httpx, aiohttp or openai."""
    places = [(error, name) for name in ("status_code", "status", "code")]
    places.append((_attribute(error, "response"), "status_code"))
    for holder, name in places:
        status = _attribute(holder, name)
        if type(status) is int and 100 <= status <= 599:
            return status
    return None


def _retry_after(error: BaseException) -> str | None:
    for holder in (error, _attribute(error, "response")):
        headers = _attribute(holder, "headers")
        get = _attribute(headers, "get")
        try:
            value = get("Retry-After") if callable(get) else None
        except Exception:  # the object is of another library
            continue
        if isinstance(value, str):
            return value
    return None


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # httpx raises where there is no response yet
        return None
