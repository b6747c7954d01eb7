"""Judges and served reward models against a real HTTP server in this process."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import threading
import time

import pytest

from spmdrl.rewards.endpoint import EndpointError
from spmdrl.rewards.judge import group_judge, judge, reward_server
from spmdrl.rewards.samples import RewardSample
from spmdrl.rewards.signatures import adapt
from tests.helpers.pool_runs import pool_of, results

pytestmark = pytest.mark.timeout(300)


class Server(http.server.ThreadingHTTPServer):
    """Answers request n by script[n] (the last again and again); remembers what it was asked."""

    daemon_threads = True
    request_queue_size = 128  # as 5 are not enough for many at once

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.stop = script, [], threading.Event()
        self.num_connections = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # as real servers do

    def setup(self):
        super().setup()
        self.server.num_connections += 1

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, body, dict(self.headers), time.monotonic()))
        step = server.script[min(len(server.asked), len(server.script)) - 1]
        status, reply, headers = step(body) if callable(step) else step
        if reply == "hang":
            server.stop.wait(30)
            return
        data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for byte in data if "X-Slow" in headers else ():
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if server.stop.wait(0.1):
                    return
            if "X-Slow" not in headers:
                self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(*script):
            server = stack.enter_context(Server(script))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            stack.callback(server.stop.set)
            return server

        yield start


def says(text, status=200, **headers):
    return status, {"choices": [{"message": {"role": "assistant", "content": text}}]}, headers


def scored(reward, text="It is 4.", prompt="2+2?", **row):
    sample = RewardSample({"prompt": prompt, "answer": "4"} | row, text, [1], False)
    (got,) = adapt(reward, spec="f")([sample])
    return got.value, got.extras.get("reply")


FAST = {"backoff_s": 0.01, "timeout_s": 100.0, "total_s": 100.0}


def test_the_template_is_filled_and_the_last_score_is_scaled(serve):
    server = serve(says("Score: 1? No. **Score:** 7.5"))
    template = "{prompt}|{response}|{reference}|{other}"
    options = dict(system="Be fair.", options={"seed": 3}, template=template)
    reward = judge(url=server.url + "/v1/", model="m", **options, **FAST)
    value, reply = scored(reward, "has {reference}", prompt=[{"role": "user", "content": "2+2?"}])
    assert (value, reply) == (0.75, "Score: 1? No. **Score:** 7.5")
    path, body, headers, _ = server.asked[0]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert body == {
        "model": "m",
        "temperature": 0,
        "max_tokens": 512,
        "seed": 3,
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "user: 2+2?|has {reference}|4|{other}"},
        ],
    }


def test_the_key_comes_from_the_environment_and_its_absence_is_said(serve, monkeypatch):
    server = serve(says("Score: 10"))
    reward = judge(url=server.url, model="m", api_key_env="MY_KEY", **FAST)
    monkeypatch.delenv("MY_KEY", raising=False)
    for call in (reward.prepare, lambda: scored(reward)):
        with pytest.raises(ValueError, match="environment variable MY_KEY is not set"):
            call()
    monkeypatch.setenv("MY_KEY", "k1")
    assert scored(reward)[0] == 1.0
    assert server.asked[0][2]["Authorization"] == "Bearer k1"


@pytest.mark.parametrize(
    "bad",
    [
        (500, "oops", {}),
        (429, "slow down", {}),
        (503, "", {}),
        (200, "{not json", {}),
        (200, "[]", {}),
        (200, "hang", {}),
        (200, {"choices": []}, {}),
        says(None),
        says("I like it"),
        says("Score: 11"),
        (200, "\xff\xfe", {}),
        (200, "[" * 100_000, {}),
    ],
)
def test_what_may_pass_is_tried_again(serve, bad):
    server = serve(bad, bad, says("Score: 5"))
    changed = {"timeout_s": 4.0} if bad[1] == "hang" else {}
    assert scored(judge(url=server.url, model="m", **FAST | changed))[0] == 0.5
    assert len(server.asked) == 3


def test_what_will_not_pass_is_an_error_at_once_with_the_reason(serve):
    server = serve((401, "no such key", {}))
    with pytest.raises(EndpointError, match="status 401 .*no such key"):
        scored(judge(url=server.url, model="m", **FAST))
    other = serve(says("Score: 5"))
    away = serve((302, "", {"Location": other.url}))
    with pytest.raises(EndpointError, match="status 302"):
        scored(judge(url=away.url, model="m", **FAST))
    assert (len(server.asked), len(away.asked), len(other.asked)) == (1, 1, 0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((200, "hang", {}), "timed out"),
        ((500, "oops", {}), "status 500 .*oops"),
        ((429, "", {"Retry-After": "60"}), "status 429"),
        (says("hm"), "no score in 'hm'"),
        ((200, "x" * 1000, {"X-Slow": "1"}), "not complete"),
    ],
)
def test_the_deadline_holds_and_the_error_says_what_came_last(serve, bad, words):
    server = serve(bad)
    began, times = time.monotonic(), dict(backoff_s=0.1, timeout_s=3.5, total_s=4.5, retries=50)
    with pytest.raises(EndpointError, match=words):
        scored(judge(url=server.url, model="m", **times))
    assert time.monotonic() - began < 20  # it would be minutes
    assert 1 <= len(server.asked) < 20


def test_what_was_said_before_is_kept_when_time_runs_out_in_the_last_try(serve):
    server = serve((500, "oops", {}), (200, "hang", {}))
    with pytest.raises(EndpointError, match="in 2 of 5 .*status 500 .*oops; then .*timed out"):
        scored(judge(url=server.url, model="m", backoff_s=0.01, timeout_s=4.0, total_s=4.0))


def test_a_server_that_is_not_there_is_tried_again_and_named():
    with socket.socket() as silent:  # it has the port, and does not listen
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"{re.escape(url)}.*in 3 of 3 tries.*refused"):
            scored(judge(url=url, model="m", **FAST | {"retries": 2}))


def test_requests_share_a_connection(serve, monkeypatch):
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    server = serve(
        says("Score: 5", **{"Content-Length": str(len(json.dumps(says("Score: 5")[1])))})
    )
    reward = judge(url=server.url, model="m", **FAST)
    for text in ("one", "two", "three"):
        assert scored(reward, text)[0] == 0.5
    assert len(server.asked) == 3
    assert server.num_connections == 1


def test_retry_after_and_the_rate_limit_are_obeyed(serve):
    server = serve((429, "", {"Retry-After": "0.5"}), says("Score: 5"))
    scored(judge(url=server.url, model="m", **FAST))
    assert server.asked[1][3] - server.asked[0][3] >= 0.5
    server, began = serve(says("Score: 5")), time.monotonic()
    reward = judge(url=server.url, model="m", requests_per_s=10, **FAST)
    for n in range(4):
        scored(reward, str(n))
    assert server.asked[3][3] - began >= 0.3  # the first one's arrival may have been late


def test_equal_requests_are_asked_once_in_memory_and_on_disk(serve, tmp_path):
    for place in ("memory", str(tmp_path / "kept.sqlite")):
        server = serve(says("bad"), says("Score: 5"), says("Score: 9"))
        reward = judge(url=server.url, model="m", cache=place, **FAST)
        assert [scored(reward, t)[0] for t in ("a", "a", "b", "a")] == [0.5, 0.5, 0.9, 0.5]
        assert len(server.asked) == 3  # one of them unusable, which is not kept
        again = judge(url=server.url, model="m", cache=place, **FAST)
        assert scored(again, "a")[0] == (0.9 if place == "memory" else 0.5)
        other = judge(url=server.url, model="m2", cache=place, **FAST)
        assert scored(other, "a")[0] == 0.9


@pytest.mark.parametrize(
    ("kind", "options", "reply", "prompt", "body", "value"),
    [
        (
            "classify",
            {},
            {"data": [{"index": 0, "label": None, "probs": [0.25], "num_classes": 1}]},
            "2+2?",
            {"model": "m", "input": "2+2?It is 4."},
            0.25,
        ),
        (
            "classify",
            {"class_index": 1, "options": {"use_activation": False}},
            {"data": [{"probs": [-1.5, 2.5]}]},
            [{"role": "user", "content": "2+2?"}],
            {
                "model": "m",
                "use_activation": False,
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "It is 4."},
                ],
            },
            2.5,
        ),
        (
            "score",
            {},
            {"data": [{"index": 0, "object": "score", "score": 0.75}]},
            "2+2?",
            {"model": "m", "text_1": "2+2?", "text_2": "It is 4."},
            0.75,
        ),
    ],
)
def test_reward_models_served_by_vllm_are_asked_in_its_protocol(
    serve, kind, options, reply, prompt, body, value
):
    server = serve((200, reply, {}))
    reward = reward_server(url=server.url, model="m", kind=kind, **options, **FAST)
    assert scored(reward, prompt=prompt)[0] == value
    assert server.asked[0][:2] == (f"/{kind}", body)


@pytest.mark.parametrize(
    "reply",
    [
        {"data": [{"probs": [0.5, 0.5]}]},
        {"data": [{"probs": []}]},
        {"data": []},
        {},
        {"data": [{"probs": ["x"]}]},
        {"data": [{"probs": [None]}]},
    ],
)
def test_replies_of_another_shape_are_errors(serve, reply):
    server = serve((200, reply, {}))
    with pytest.raises(EndpointError, match="unusable reply"):
        scored(reward_server(url=server.url, model="m", **FAST | {"retries": 1}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:1"}, "url: expected http"),
        ({"url": "http://localhost:port"}, "url: Invalid port"),
        ({"template": "{prompt}"}, "no {response}"),
        ({"low": 1, "high": 1}, "low below high"),
        ({"score_pattern": "x"}, "no group"),
        ({"timeout_s": 9, "total_s": 8}, "timeout_s"),
        ({"retries": -1}, "retries"),
    ],
)
def test_wrong_arguments_are_refused_when_the_judge_is_made(options, words):
    with pytest.raises(ValueError, match=words):
        judge(**{"url": "http://x", "model": "m"} | options)
    with pytest.raises(ValueError, match="kind: expected"):
        reward_server(url="http://x", model="m", kind="rerank")


def test_a_judge_of_a_users_file_runs_in_the_pool_and_its_failures_are_no_zeros(serve, tmp_path):
    def by_text(body):
        text = body["messages"][-1]["content"]
        failures = {"HANG": (200, "hang", {}), "LONG": (400, "too long", {})}
        return next((failures[word] for word in failures if word in text), says("Score: 8"))

    server = serve(by_text)
    (tmp_path / "mine.py").write_text(
        "from spmdrl.rewards.judge import judge\n"
        f"score = judge(url={server.url!r}, model='m', timeout_s=4, total_s=4, cache='memory')\n"
    )
    with pool_of(f"{tmp_path}/mine.py:score") as pool:
        done = results(pool, ["fine", "HANG", "fine", "LONG"])
    assert [r.value for r in done] == [0.8, None, 0.8, None]
    assert [r.failure for r in done] == [None, "error", None, "error"]
    assert "timed out" in done[1].message and "status 400" in done[3].message
    assert done[0].extras["reply"] == "Score: 8"
    assert len(server.asked) >= 3


# --------------------------------------------------------------------------- groups


def by_length(body):
    """A judge that gives each response its length, and says something of the first besides."""
    text = body["messages"][-1]["content"]
    found = re.findall(r"=== response (\d+) \(\w{8}\) ===\n(.*)", text)
    lines = [f"**Score {number}**: {len(response)}" for number, response in found]
    return says("Score 1: 9 at first sight.\n" + "\n".join(lines))


def judged(reward, texts, row):
    samples = [RewardSample(row, text, [1], False) for text in texts]
    adapted = adapt(reward, spec="f", scope="step")
    assert adapted.scope == "group" and adapted.concurrency == 32
    return [got.value for got in adapted(samples)]


def test_a_group_judge_asks_once_and_gives_each_response_its_own_score(serve):
    server = serve(by_length)
    reward = group_judge(url=server.url, model="m", rubric=["It is short."], **FAST)
    texts = ["aaaa", "=== response 2 ===", "bb", "aaaa", ""]
    row = {"prompt": "2+2?", "answer": "4"}
    with pytest.raises(EndpointError, match="18.0 is outside"):
        judged(group_judge(url=server.url, model="m", **FAST | {"retries": 0}), texts, row)
    texts[1] = "{prompt}"
    assert judged(reward, texts, row) == [0.4, 0.8, 0.2, 0.4, 0.0]
    assert len(server.asked) == 2
    question = server.asked[1][1]["messages"][0]["content"]
    assert "each of 5 responses" in question and "Judge by this:\n- It is short." in question
    orders = set()
    for word in "abcdefgh":
        assert judged(reward, [word, word * 2], row) == [0.1, 0.2]
        orders.add(re.findall(r"===\n(\w+)", server.asked[-1][1]["messages"][0]["content"])[0])
    assert {len(first) for first in orders} == {1, 2}, "the order is not of chance"


def test_a_judge_of_one_response_gives_each_of_a_group_its_own_score(serve):
    server = serve(*(says(f"Score: {n}") for n in (1, 2, 3)))
    with pytest.raises(TypeError, match="scope"):
        judge(url=server.url, model="m", scope="group", **FAST)
    reward = judge(url=server.url, model="m", **FAST)
    reward.scope = "group"  # as any function may have it
    assert reward(["p"] * 3, ["a", "b", "c"]) == [0.1, 0.2, 0.3]


def test_a_group_judge_takes_the_rows_rubric_and_refuses_what_is_incomplete(serve):
    server = serve(by_length, says("Score 1: 5"))
    row = {"prompt": "q", "answer": "4", "rubric": ["a", "b"]}
    reward = group_judge(url=server.url, model="m", **FAST | {"retries": 0})
    assert judged(reward, ["x"], row) == [0.1]
    assert "Judge by this:\n- a\n- b" in server.asked[0][1]["messages"][0]["content"]
    with pytest.raises(EndpointError, match="no score of response 2 of 2"):
        judged(reward, ["x", "yy"], row)
    with pytest.raises(ValueError, match="one prompt"):
        reward(["q", "r"], ["x", "y"])
    for wrong in (dict(template="{prompt}"), dict(low=1, high=1)):
        with pytest.raises(ValueError):
            group_judge(url=server.url, model="m", **wrong)
    with pytest.raises(ValueError, match="has no .rubric"):
        group_judge(url=server.url, model="m", template="{responses}", rubric="a")
