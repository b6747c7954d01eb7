"""Ask a model behind an HTTP endpoint for JSON: deadline, retries, rate limit, cache.

One Endpoint belongs to one reward worker, whose threads may ask at once; it keeps their connections
open, so that requests after the first save the handshakes of TCP and TLS. Throughput is
rewards.workers times those threads divided by the endpoint's latency, and a rate limit of N
requests/s lets N times workers times engine replicas through.
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
_MAX_REMEMBERED = 10_000
_IDLE_S = 2.0
"""An idle connection is closed after this long: before the 5 s of uvicorn, which vLLM serves by, so
that no request goes into a connection that its server is just closing."""


class EndpointError(RuntimeError):
    """The endpoint gave no usable reply in time: a failure of the reward, which is no zero."""


class Endpoint:
    """One URL that takes and returns JSON.

    Args:
        url: http or https.
        api_key_env: environment variable that holds the key, sent as `Authorization: Bearer`;
            empty sends none.
        timeout_s: wall-clock seconds of one request.
        total_s: of all tries and waits for one sample; keep it below rewards.timeout_s.
        retries: further requests after one that failed in a way that may pass: no connection, a
            timeout, status 408, 425, 429, 5xx, a reply that cannot be read. Waits double from
            `backoff_s`, with jitter; `Retry-After` is obeyed.
        requests_per_s: at most, of this worker; 0 for no limit.
        cache: "" for none, `memory`, or the path of a SQLite file that all workers and later
            runs share (on a local disk). Keyed by URL and request.
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
        self._turns = threading.Lock()
        # What threads ask for, by key; each goes with the last of them.
        self._asking: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._asking_lock = threading.Lock()
        self._cache = _Cache(cache)
        self._client = httpx.Client(
            verify=ssl.create_default_context(),  # this machine's authorities, not certifi's
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            follow_redirects=False,  # one would carry the key to another host
        )

    def headers(self) -> dict[str, str]:
        """Return those of a request. Raises: Refusal without the key."""
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
        """Send a request and return what `read` makes of the reply.

        Args:
            read: takes the decoded JSON; raises ValueError, KeyError, IndexError or TypeError for
                a reply that is worth asking again for. Only what it can read is cached.
        Raises: EndpointError when no try gave a reply in time; Refusal without the key.
        """
        data = json.dumps(body, sort_keys=True).encode()
        key = hashlib.sha256(self.url.encode() + b"\n" + data).hexdigest()
        end = time.monotonic() + self._total_s
        with contextlib.ExitStack() as held:
            if self._cache.is_kept:  # equal requests are asked once
                with self._asking_lock:
                    lock = self._asking.setdefault(key, threading.Lock())
                if not lock.acquire(timeout=max(0.0, end - time.monotonic())):
                    raise EndpointError(
                        f"{self.url}: an equal request got no usable reply within "
                        f"{self._total_s:g} s"
                    )
                held.callback(lock.release)
            if (kept := self._cache.get(key)) is not None:
                return read(json.loads(kept))
            return self._asked(data, key, read=read, end=end)

    def _asked(self, data: bytes, key: str, *, read: Callable[[Any], T], end: float) -> T:
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
                # A try that ended for want of time says less than what came before it.
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
        with self._turns:
            now = time.monotonic()
            turn = max(now, self._next)
            if turn >= end:
                return False
            self._next = turn + self._interval_s
        time.sleep(turn - now)
        return True

    def _reply(self, data: bytes, headers: dict[str, str], *, end: float) -> str:
        """Return the reply's text.

        Raises: httpx.HTTPStatusError for a status that is no success; httpx.RequestError,
            TimeoutError; ValueError for what is no text.
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
    """Replies by key: nowhere, in memory, or in a file. For several threads."""

    def __init__(self, place: str):
        self.is_kept = bool(place)
        self._is_bounded = place == "memory"
        self._place = ":memory:" if self._is_bounded else place
        self._file: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        if not self.is_kept:
            return None
        with self._lock:
            found = self._open().execute("SELECT reply FROM replies WHERE key = ?", (key,))
            row = found.fetchone()
        return row[0] if row else None

    def put(self, key: str, reply: str) -> None:
        """Keep a reply under its request's key; where there is no cache, do nothing."""
        if not self.is_kept:
            return
        with self._lock, self._open() as file:
            put = file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
            if self._is_bounded:  # rows are numbered in the order of coming
                oldest = (put.lastrowid or 0) - _MAX_REMEMBERED
                file.execute("DELETE FROM replies WHERE rowid <= ?", (oldest,))

    def _open(self) -> sqlite3.Connection:
        if self._file is None:  # here, so that each process has its own
            self._file = sqlite3.connect(self._place, timeout=5.0, check_same_thread=False)
            with self._file as file:
                file.execute(
                    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)"
                )
        return self._file
