"""Calls of reward functions that failed in a way that may pass, such as a server's restart.

Runs inside a reward worker, so it imports nothing heavy.
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
"""Of HTTP, that a later request may not get."""
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
_chance = random.Random()  # the functions' own draws stay what they are


class Retries:
    """The calls of one job, each made again where its failure may pass.

    Args:
        most: of each call.
        end: time.monotonic() of the job's deadline; no wait goes beyond it.
    """

    def __init__(self, most: int, *, end: float):
        self._most = most
        self._end = end
        self.count = 0
        """Calls that were made again."""

    def call(self, function: Callable[[], T], *, transient: Errors = ()) -> T:
        """Return what a function returns.

        Args:
            transient: errors of its own that may pass.
        Raises: what it raises at last.
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
        """As `call`, of a function whose result is awaited."""
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
        """Return how long to wait before the next call, seconds; None for no other call."""
        if attempt >= self._most or not may_pass(error, transient):
            return None
        wait_s = backoff_s(attempt, after=_retry_after(error))
        return wait_s if time.monotonic() + wait_s < self._end else None


def may_pass(error: BaseException, transient: Errors = ()) -> bool:
    """Return whether a call that failed by this may succeed later.

    It may where the error, or one that it was raised from, is of `transient`, carries an HTTP
    status of PASSING_STATUSES, or is of a connection: an OSError that is none of files, or a
    connection's error of a known HTTP client. Another status says that it does not pass.
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
    """Return how long to wait after a failed try, seconds: twice as long each time, with jitter.

    Args:
        attempt: from 0.
        after: the reply's Retry-After, which is obeyed where it is a number of seconds.
    """
    wait_s = min(_MAX_BACKOFF_S, first_s * 2**attempt) * _chance.uniform(0.5, 1.0)
    if after and re.fullmatch(r"\s*\d+(\.\d*)?\s*", after):  # else a date
        return max(wait_s, float(after))
    return wait_s


def _is_of_connection(error: BaseException) -> bool:
    if isinstance(error, ValueError | Warning):  # requests' InvalidURL is an OSError too
        return False
    if isinstance(error, OSError) and not isinstance(error, _OF_FILES):
        return True
    names = {f"{own.__module__.partition('.')[0]}.{own.__name__}" for own in type(error).__mro__}
    return not names.isdisjoint(_OF_CONNECTIONS)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of urllib, requests, httpx, aiohttp or openai has."""
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
        except Exception:  # a stranger's object
            continue
        if isinstance(value, str):
            return value
    return None


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # httpx raises where there is no response yet
        return None
