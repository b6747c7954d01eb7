"""Which failures of a reward function's call may pass, and how calls are made again."""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.error

import aiohttp
import httpx
import openai
import pytest
import requests

from spmdrl.errors import Refusal
from spmdrl.rewards import retries
from spmdrl.rewards.endpoint import EndpointError
from spmdrl.rewards.graders import code, math
from spmdrl.rewards.retries import Retries, backoff_s, may_pass
from spmdrl.rewards.signatures import adapt

REQUEST = httpx.Request("POST", "http://judge/v1")


class Busy(Exception):
    """An error of the user's own."""


def caused(error: Exception, cause: Exception) -> Exception:
    """Return an error as `raise error from cause` leaves it."""
    error.__cause__ = cause
    return error


def of_httpx(status: int) -> Exception:
    reply = httpx.Response(status, request=REQUEST)
    return httpx.HTTPStatusError("bad", request=REQUEST, response=reply)


def of_requests(status: int) -> Exception:
    reply = requests.Response()
    reply.status_code = status
    return requests.HTTPError("bad", response=reply)


def of_openai(status: int) -> Exception:
    reply = httpx.Response(status, request=REQUEST)
    return openai.APIStatusError("bad", response=reply, body=None)


def of_urllib(status: int) -> Exception:
    return urllib.error.HTTPError("http://judge", status, "bad", http.client.HTTPMessage(), None)


def of_aiohttp(status: int) -> Exception:
    return aiohttp.ClientResponseError(None, (), status=status)


@pytest.mark.parametrize("made", [of_httpx, of_requests, of_openai, of_urllib, of_aiohttp])
def test_the_status_of_a_reply_says_whether_it_may_pass(made):
    assert [may_pass(made(status)) for status in (429, 500, 503)] == [True] * 3
    assert [may_pass(made(status)) for status in (400, 401, 404, 422)] == [False] * 4
    assert may_pass(caused(RuntimeError("no score"), made(503)))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        ConnectionResetError(),
        TimeoutError(),
        urllib.error.URLError("no route"),
        http.client.RemoteDisconnected(),
        http.client.IncompleteRead(b""),
        httpx.ReadTimeout("slow", request=REQUEST),
        httpx.RemoteProtocolError("gone", request=REQUEST),
        requests.ConnectionError(),
        requests.Timeout(),
        openai.APIConnectionError(request=REQUEST),
        aiohttp.ServerDisconnectedError(),
        caused(RuntimeError("the judge is away"), ConnectionRefusedError()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failures_of_connections_may_pass(error):
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("answer"),
        ValueError("no number"),
        FileNotFoundError("key.txt"),
        PermissionError(),
        requests.exceptions.InvalidURL("htp://"),
        ZeroDivisionError(),
        EndpointError("503 five times"),  # a judge's, which has made its own tries
        Busy(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_failures_do_not_pass_unless_the_function_says_so(error):
    assert not may_pass(error)
    assert may_pass(error, (type(error),))


def test_errors_whose_attributes_raise_and_rings_of_causes_end():
    class Hostile(Exception):
        @property
        def response(self):
            raise RuntimeError("no response yet")

    first, second = Hostile(), Hostile()
    caused(first, caused(second, first))
    assert not may_pass(first)


def test_waits_double_with_jitter_and_obey_retry_after():
    for attempt, most in ((0, 0.5), (1, 1.0), (4, 8.0), (30, 8.0)):
        waits = {backoff_s(attempt) for _ in range(20)}
        assert most / 2 <= min(waits) < max(waits) <= most
    assert backoff_s(0, after="3") == 3.0
    assert backoff_s(0, after="Wed, 21 Oct 2026 07:28:00 GMT") <= 0.5
    reply = httpx.Response(429, request=REQUEST, headers={"Retry-After": "30"})
    error = httpx.HTTPStatusError("busy", request=REQUEST, response=reply)
    tries = Retries(5, end=time.monotonic() + 10)
    with pytest.raises(httpx.HTTPStatusError):  # at once: the deadline comes before the 30 s
        tries.call(lambda: _raise(error))
    assert tries.count == 0


def _raise(error: Exception) -> None:
    raise error


def failing(times: int, error: Exception):
    """Return a function that fails so often, then returns the number of its calls."""
    calls = []

    def function() -> int:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    return function, calls


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_is_made_again_so_often_at_most(is_async, monkeypatch):
    monkeypatch.setattr(retries, "backoff_s", lambda attempt, after: 0.001)

    def call(tries, function, **options):
        if not is_async:
            return tries.call(function, **options)

        async def wait():
            return function()

        return asyncio.run(tries.call_async(wait, **{"transient": ()} | options))

    end = time.monotonic() + 100
    tries = Retries(3, end=end)
    assert call(tries, failing(3, ConnectionError())[0]) == 4
    assert call(tries, failing(1, Busy())[0], transient=(Busy,)) == 2
    assert tries.count == 4
    function, calls = failing(9, ConnectionError("refused"))
    with pytest.raises(ConnectionError, match="refused"):
        call(tries, function)
    assert len(calls) == 4
    for most, error in ((3, KeyError()), (0, ConnectionError())):
        function, calls = failing(9, error)
        with pytest.raises(type(error)):
            call(Retries(most, end=end), function)
        assert len(calls) == 1
    function, calls = failing(9, ConnectionError())
    with pytest.raises(ConnectionError):
        call(Retries(3, end=time.monotonic() - 1), function)
    assert len(calls) == 1


def test_a_function_says_which_of_its_errors_may_pass():
    def grade(completions):
        return [0.0]

    assert adapt(grade, spec="f").transient == ()
    grade.transient = Busy
    assert adapt(grade, spec="f").transient == (Busy,)
    grade.transient = ("Busy",)
    with pytest.raises(Refusal, match=r"f has transient \('Busy',\); expected exception classes"):
        adapt(grade, spec="f")


def test_the_setting_comes_after_the_functions_own_concurrency():
    def plain(completions):
        return [0.0]

    async def waits(completions):
        return [0.0]

    def own(completions):
        return [0.0]

    own.concurrency = 3

    def found(function, **options):
        return adapt(function, spec="f", **options).concurrency

    assert [found(f) for f in (plain, waits, own)] == [1, 32, 3]
    assert [found(f, concurrency=8) for f in (plain, waits, own)] == [8, 8, 3]
    assert [found(f, concurrency=8) for f in (math, code)] == [1, 1]
