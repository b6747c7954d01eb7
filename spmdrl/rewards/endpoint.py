"""Requests for JSON to an HTTP endpoint, with deadline, retries, rate limit and cache.

An Endpoint belongs to one reward worker, whose threads may use it at the same time. It keeps their
connections open, so that only the first request needs the handshakes of TCP and TLS. The throughput
is rewards.workers times the threads of each, divided by the latency of the endpoint. The rate limit
holds for each worker of each engine replica.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import httpx

from spmdrl.errors import Refusal
from spmdrl.rewards.retries import BACKOFF_S, PASSING_STATUSES, backoff_s

T = TypeVar("T")

_MAX_REPLY_BYTES = 16 << 20
_MAX_IN_MEMORY = 10_000  # replies
# After this an idle connection is closed. vLLM's server, uvicorn, closes it after 5 s, and no
# request may use a connection that the server is closing.
_IDLE_S = 2.0


class EndpointError(RuntimeError):
    """The endpoint gave no usable reply in time: the reward failed, and is not 0."""


class Endpoint:
    """One URL that takes and returns JSON.

    Args:
        url: http or https.
        api_key_env: environment variable with the key, which is sent as `Authorization: Bearer`;
            empty for none.
        timeout_s: wall-clock seconds of one request.
        total_s: of all tries and waits for one sample; keep it below rewards.timeout_s.
        retries: repeats of a request that failed in a way that may pass: no connection, a timeout,
            status 408, 425, 429 or 5xx, or a reply that cannot be read. Waits double from
            `backoff_s`, with jitter; `Retry-After` is obeyed.
        requests_per_s: limit of this worker; 0 for none.
        cache: "" for none, `memory`, or the path of a SQLite file on a local disk, which all
            workers and later runs share. The key is the URL and the request.
    Raises: Refusal for arguments.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key_env: str = "",
        timeout_s: float = 6.0,
        total_s: float = 8.0,
        retries: int = 4,
        backoff_s: float = BACKOFF_S,
        requests_per_s: float = 0.0,
        cache: str = "",
    ):
        if not url.startswith(("http://", "https://")):
            raise Refusal(f"url: expected http://... or https://..., got {url!r}")
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise Refusal(f"url: {error}, got {url!r}") from error
        if not 0 < timeout_s <= total_s:
            raise Refusal(f"timeout_s: must be in (0, total_s = {total_s}], got {timeout_s}")
        counts = {"retries": retries, "backoff_s": backoff_s, "requests_per_s": requests_per_s}
        for name, value in counts.items():
            if value < 0:
                raise Refusal(f"{name}: must be 0 or more, got {value}")
        self.url = url
        self._api_key_env = api_key_env
        self._timeout_s = timeout_s
        self._total_s = total_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._interval_s = 1 / requests_per_s if requests_per_s else 0.0
        self._next = 0.0
        self._rate_lock = threading.Lock()
        # {key of a request: its lock}, as long as a thread uses it.
        self._request_locks: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._request_locks_lock = threading.Lock()
        self._cache = _Cache(cache)
        self._client = httpx.Client(
            verify=ssl.create_default_context(),  # this machine's authorities, not certifi's
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            follow_redirects=False,  # a redirect would send the key to another host
        )

    def headers(self) -> dict[str, str]:
        """Return the headers of a request. Raises: Refusal if the key is not set."""
        headers = {"Content-Type": "application/json"}
        if self._api_key_env:
            key = os.environ.get(self._api_key_env)
            if not key:
                raise Refusal(
                    f"api_key_env: the environment variable {self._api_key_env} is "
                    "not set here; export it where the job starts"
                )
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def ask(self, body: Mapping[str, Any], *, read: Callable[[Any], T]) -> T:
        """Send a request and return `read(reply)`.

        Args:
            read: takes the decoded JSON; raises ValueError, KeyError, IndexError or TypeError for
                a reply that should be requested again. Only replies that it reads are cached.
        Raises: EndpointError when no try gave a reply in time; Refusal if the key is not set.
        """
        data = json.dumps(body, sort_keys=True).encode()
        key = hashlib.sha256(self.url.encode() + b"\n" + data).hexdigest()
        end = time.monotonic() + self._total_s
        if not self._cache.is_used:
            return self._request(data, key, read=read, end=end)
        # Equal requests are sent once.
        with self._request_locks_lock:
            lock = self._request_locks.setdefault(key, threading.Lock())
        if not lock.acquire(timeout=max(0.0, end - time.monotonic())):
            raise EndpointError(
                f"{self.url}: an equal request got no usable reply within {self._total_s:g} s"
            )
        try:
            cached = self._cache.get(key)
            if cached is not None:
                return read(json.loads(cached))
            return self._request(data, key, read=read, end=end)
        finally:
            lock.release()

    def _request(self, data: bytes, key: str, *, read: Callable[[Any], T], end: float) -> T:
        headers = self.headers()
        failure = "no time for a request"
        for attempt in range(self._retries + 1):
            if not self._wait_for_turn(end):
                break
            retry_after = None
            try:
                text = self._reply(data, headers, end=min(end, time.monotonic() + self._timeout_s))
                value = read(json.loads(text))
                self._cache.put(key, text)
                return value
            except httpx.HTTPStatusError as error:
                failure = str(error)
                if error.response.status_code not in PASSING_STATUSES:
                    raise EndpointError(f"{self.url}: {failure}") from None
                retry_after = error.response.headers.get("Retry-After")
            except (httpx.RequestError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
                # If the deadline cut this try off, the failure before it says more.
                is_cut = attempt > 0 and time.monotonic() >= end
                failure = f"{failure}; then {reason}" if is_cut else reason
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                failure = f"unusable reply: {type(error).__name__}: {error}"
            wait_s = backoff_s(attempt, first_s=self._backoff_s, after=retry_after)
            if attempt == self._retries or time.monotonic() + wait_s >= end:
                break
            time.sleep(wait_s)
        raise EndpointError(
            f"{self.url}: no usable reply in {attempt + 1} of "
            f"{self._retries + 1} tries within {self._total_s:g} s; last: "
            f"{failure[:500]}"
        )

    def _wait_for_turn(self, end: float) -> bool:
        with self._rate_lock:
            now = time.monotonic()
            turn = max(now, self._next)
            if turn >= end:
                return False
            self._next = turn + self._interval_s
        time.sleep(turn - now)
        return True

    def _reply(self, data: bytes, headers: dict[str, str], *, end: float) -> str:
        """Return the reply's text.

        Raises: httpx.HTTPStatusError for a status other than success; httpx.RequestError,
            TimeoutError; ValueError for a reply that is no text or too long.
        """
        timeout_s = max(0.001, end - time.monotonic())
        with self._client.stream(
            "POST", self.url, content=data, headers=headers, timeout=timeout_s
        ) as reply:
            if not reply.is_success:
                message = f"status {reply.status_code} {reply.reason_phrase}: {_beginning(reply)}"
                raise httpx.HTTPStatusError(message, request=reply.request, response=reply)
            parts: list[bytes] = []
            size = 0
            for part in reply.iter_bytes():
                parts.append(part)
                size += len(part)
                if time.monotonic() > end:  # httpx's own timeout is per piece
                    raise TimeoutError(f"the reply was not complete after {self._timeout_s:g} s")
                if size > _MAX_REPLY_BYTES:
                    raise Refusal(f"more than {_MAX_REPLY_BYTES} bytes")
        return b"".join(parts).decode()


def _beginning(reply: httpx.Response) -> str:
    """Return the first characters of a reply's body, for messages."""
    with contextlib.suppress(httpx.RequestError):
        for part in reply.iter_bytes():
            return part[:300].decode("utf-8", "replace")
    return ""


class _Cache:
    """Replies by key: nowhere, in memory, or in a file. Thread-safe."""

    def __init__(self, place: str):
        self.is_used = bool(place)
        self._is_bounded = place == "memory"
        self._place = ":memory:" if self._is_bounded else place
        self._file: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        with self._lock:
            found = self._open().execute("SELECT reply FROM replies WHERE key = ?", (key,))
            row = found.fetchone()
        return row[0] if row else None

    def put(self, key: str, reply: str) -> None:
        """Store a reply, if there is a cache."""
        if not self.is_used:
            return
        with self._lock, self._open() as file:
            put = file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
            if self._is_bounded:  # rowid grows with each reply
                oldest = (put.lastrowid or 0) - _MAX_IN_MEMORY
                file.execute("DELETE FROM replies WHERE rowid <= ?", (oldest,))

    def _open(self) -> sqlite3.Connection:
        if self._file is None:  # opened here, so that each process has its own connection
            self._file = sqlite3.connect(self._place, timeout=5.0, check_same_thread=False)
            with self._file as file:
                file.execute(
                    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)"
                )
        return self._file
