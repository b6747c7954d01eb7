"""Functions that wait: many samples under way in one worker, each with its own deadline."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path

import pytest

from spmdrl.rewards.judge import judge
from spmdrl.rewards.samples import RewardSample
from spmdrl.rewards.signatures import adapt
from spmdrl.workers import job_queue
from tests.helpers.pool_runs import pool_of, results, results_side_by_side
from tests.rewards.test_judge import says, serve  # noqa: F401

pytestmark = pytest.mark.timeout(300)
WAITING = """
import asyncio, os, re, threading, time
under_way = most = now = peak = 0
all_of_us, threads = asyncio.Barrier(32), threading.Barrier(8)

async def waits(completions, **columns):
    word, _, rest = completions[0].partition(" ")
    if word == "hang":
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:  # does not listen
            await asyncio.sleep(1000)
    if word == "raise":
        raise KeyError("lost")
    if word == "sysexit":
        raise SystemExit(3)
    if word == "blocks":  # all others too
        time.sleep(1000)
    await asyncio.sleep(0.2)
    return [float(os.getpid())] if word == "pid" else [float(len(completions[0]))]

def in_threads(solution_str, ground_truth):
    word = solution_str.partition(" ")[0]
    if word == "exit":
        time.sleep(0.1)
        os._exit(7)
    if word == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if word == "hang":
        time.sleep(1000)
    time.sleep(0.2)
    return {"score": float(len(solution_str)), "pred": solution_str}

in_threads.concurrency = 8

# These two come back when so many are under way at once; they say how many were at most.
async def together(solution_str, ground_truth):
    global now, peak
    now += 1
    peak = max(peak, now)
    await all_of_us.wait()
    now -= 1
    return {"score": float(len(solution_str)), "peak": peak}

counting = threading.Lock()

def together_in_threads(solution_str, ground_truth):
    global now, peak
    with counting:
        now += 1
        peak = max(peak, now)
    threads.wait()
    with counting:
        now -= 1
    return {"score": float(len(solution_str)), "peak": peak, "pred": solution_str}

together_in_threads.concurrency = 8

def one_at_a_time(solution_str, ground_truth):
    global under_way, most
    under_way += 1
    most = max(most, under_way)
    time.sleep(0.01)
    under_way -= 1
    return {"score": 100.0, "most": most}

def wrong(completions):
    return [1.0]

wrong.concurrency = "many"
"""


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(WAITING)
    return path


@pytest.mark.parametrize(("name", "concurrency"), [("together", 32), ("together_in_threads", 8)])
def test_as_many_samples_are_under_way_as_the_concurrency(place, name, concurrency):
    texts = ["x" * n for n in range(64)]
    with pool_of(f"{place}:{name}") as pool:
        done = results(pool, texts)
        assert len(pool._workers) == 1
    assert [r.value for r in done] == [float(n) for n in range(64)], done
    assert max(r.metrics["peak"] for r in done) == concurrency


FAILING = {
    ("waits", "hang"): ("timeout", "mine.py:N) within rewards.timeout_s = 4 s"),
    ("waits", "raise"): ("error", "lost"),
    ("waits", "sysexit"): ("error", "SystemExit"),
    ("waits", "blocks"): ("timeout", "no result"),
    ("in_threads", "hang"): ("timeout", "mine.py:N) within rewards.timeout_s = 4 s"),
    ("in_threads", "exit"): ("error", "exit code 7"),
    ("in_threads", "regex"): ("timeout", "no result"),
}


def test_a_failing_sample_costs_only_itself_whoever_was_under_way(place):
    texts = {case: [case[1] if n == 4 else "x" * n for n in range(12)] for case in FAILING}
    with contextlib.ExitStack() as stack:
        pools = {}
        for name, bad in FAILING:
            pool = stack.enter_context(pool_of(f"{place}:{name}", timeout_s=4.0))
            pools[name, bad] = pool
            pool.start()
        found = results_side_by_side(pools, texts)
    for case, (failure, words) in FAILING.items():
        done, others = found[case], [r for n, r in enumerate(found[case]) if n != 4]
        assert [r.failure for r in others] == [None] * 11, (case, done)
        assert [r.value for r in others] == [float(n) for n in range(12) if n != 4], case
        assert (done[4].failure, done[4].value) == (failure, None), (case, done[4])
        assert words in re.sub(r"py:\d+", "py:N", done[4].message), (case, done[4])


def test_every_call_that_hangs_is_a_timeout_and_they_pass_at_once(place, monkeypatch):
    monkeypatch.setattr(job_queue, "_REPORT_S", 20.0)  # a busy machine may keep the worker waiting
    with pool_of(f"{place}:waits", timeout_s=4.0) as pool:
        pool.start()
        keeper, began = pool._workers[0].process.pid, time.monotonic()
        (worker,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        done = results(pool, ["hang"] * 20 + ["pid"] * 4)
        took_s = time.monotonic() - began
    assert [r.failure for r in done] == ["timeout"] * 20 + [None] * 4
    assert all(r.seconds >= 4.0 for r in done[:20])
    assert took_s < 40  # one by one: 80 s
    assert {r.value for r in done[20:]} == {float(worker)}  # nothing was killed


def test_functions_that_allow_one_at_a_time_get_that_beside_others(place):
    names = ("one_at_a_time", "waits", "together_in_threads")
    with pool_of(*(f"{place}:{name}" for name in names), weights=(1.0, 1.0, 0.0)) as pool:
        done = results(pool, ["x" * n for n in range(24)])
    assert [r.value for r in done] == [100.0 + n for n in range(24)]
    assert {r.metrics["one_at_a_time/most"] for r in done} == {1.0}
    assert done[3].parts == {"one_at_a_time": 100.0, "waits": 3.0, "together_in_threads": 3.0}
    assert done[3].extras == {"together_in_threads/pred": "xxx"}
    # As many as the one that allows least.
    assert max(r.metrics["together_in_threads/peak"] for r in done) == 8


def test_a_concurrency_that_is_no_number_is_refused(place):
    with pool_of(f"{place}:wrong") as pool, pytest.raises(ValueError, match="'many'; expected"):
        pool.start()
    with pytest.raises(ValueError, match="f has concurrency 0; expected .* 1 or more"):
        adapt(judge(url="http://x", model="m", concurrency=0), spec="f")


# ------------------------------------------------------------------ plain functions that ask

ASKS = """
import json, urllib.request

def asks(solution_str, ground_truth):
    data = json.dumps({"text": solution_str}).encode()
    with urllib.request.urlopen("URL", data=data, timeout=100) as reply:
        return float(json.load(reply)["score"])
"""


def asking(server, folder):
    """Write a plain function that asks a server; return its spec."""
    (folder / "asks.py").write_text(ASKS.replace("URL", server.url))
    return f"{folder}/asks.py:asks"


def test_one_setting_has_a_plain_function_ask_many_times_at_once(serve, tmp_path):
    seen: dict = {}
    wait = together("", count=8, seen=seen)
    server = serve(lambda body: wait(body) and (200, {"score": len(body["text"])}, {}))
    with pool_of(asking(server, tmp_path), timeout_s=100.0, concurrency=8) as pool:
        done = results(pool, ["x" * n for n in range(24)])
        assert len(pool._workers) == 1
    assert [r.value for r in done] == [float(n) for n in range(24)], done
    assert seen["most"] == 8 and [r.retries for r in done] == [0] * 24


@pytest.mark.parametrize("concurrency", [0, 4])
def test_a_failure_that_may_pass_is_tried_again_and_counted(serve, tmp_path, concurrency):
    asked: dict = {}

    def reply(body):
        text = body["text"]
        asked[text] = asked.get(text, 0) + 1
        if text == "wrong":
            return 400, {}, {}
        if text == "away" or asked[text] == 1:
            return 503, {}, {}
        return 200, {"score": asked[text]}, {}

    pool = pool_of(asking(serve(reply), tmp_path), concurrency=concurrency, retries=1)
    with pool:
        done = results(pool, ["a", "wrong", "away", "b"])
    assert [r.value for r in done] == [2.0, None, None, 2.0], done
    assert [r.retries for r in done] == [1, 0, 1, 1]
    assert [r.failure for r in done] == [None, "error", "error", None]
    assert "HTTP Error 400" in done[1].message and "retries" not in done[1].message
    assert "HTTP Error 503" in done[2].message and "after 1 retries" in done[2].message
    assert asked == {"a": 2, "wrong": 1, "away": 2, "b": 2}


# ------------------------------------------------------------------ a judge


def together(text, *, count, seen):
    """Answer when so many requests are under way, noting how many were at most."""
    lock, all_of_us = threading.Lock(), threading.Barrier(count)

    def reply(body):
        with lock:
            seen["now"] = seen.get("now", 0) + 1
            seen["most"] = max(seen.get("most", 0), seen["now"])
        all_of_us.wait(200)
        with lock:
            seen["now"] -= 1
        return says(text)

    return reply


def test_a_worker_has_so_many_requests_under_way_as_the_judge_says(serve, tmp_path):
    seen: dict = {}
    server = serve(together("Score: 8", count=8, seen=seen))
    (tmp_path / "mine.py").write_text(
        "from spmdrl.rewards.judge import judge\n"
        f"score = judge(url={server.url!r}, model='m', concurrency=8, timeout_s=100, "
        "total_s=100)\n"
    )
    with pool_of(f"{tmp_path}/mine.py:score", timeout_s=100.0) as pool:
        done = results(pool, [str(n) for n in range(48)])
    assert {r.value for r in done} == {0.8} and len(server.asked) == 48
    assert seen["most"] == 8


def ask_at_once(reward, texts):
    """Ask from as many threads; return the values in order."""
    values = [None] * len(texts)

    def ask(n):
        sample = RewardSample({"prompt": "q"}, texts[n], [1], False)
        values[n] = adapt(reward, spec="f")([sample])[0].value

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return values


def test_rate_limit_and_cache_hold_for_all_threads_together(serve, tmp_path):
    server = serve(says("Score: 5"))
    patient = {"timeout_s": 100, "total_s": 100}
    limited = judge(url=server.url, model="m", requests_per_s=20, **patient)
    began = time.monotonic()
    assert ask_at_once(limited, [str(n) for n in range(12)]) == [0.5] * 12
    # Not from the first request's arrival, which may have been late.
    times = [asked[3] - began for asked in server.asked]
    assert len(times) == 12 and max(times) >= 11 / 20
    for cache in ("memory", str(tmp_path / "kept.sqlite")):
        server = serve(lambda body: time.sleep(0.2) or says("Score: 5"))
        kept = judge(url=server.url, model="m", cache=cache, **patient)
        assert ask_at_once(kept, ["a"] * 6 + ["b"] * 6) == [0.5] * 12
        assert len(server.asked) == 2, "equal requests are asked once"
