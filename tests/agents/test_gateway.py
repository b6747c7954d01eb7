"""The gateway's process, with OpenAI's client and with agents that mean harm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import textwrap
import time
from urllib.parse import urlsplit

import aiohttp
import httpx
import openai
import pytest

from spmdrl.agents.chats import make_judge_chat
from spmdrl.agents.frames import FramedSocket
from spmdrl.agents.gateway import Gateway
from spmdrl.agents.messages import JUDGE, NO_PARENT, judge_variables
from spmdrl.errors import Refusal
from spmdrl.rewards.columns import function_problems
from spmdrl.rewards.judge import judge
from spmdrl.rewards.samples import JUDGE_KEY, JUDGE_URL
from tests.helpers.built import changed
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.gateway_runs import QUESTION, agent_config, gateway_in_thread, standing_in

END = "<|im_end|>"


def write(ask):
    """Answer each request alike."""
    return [f"answer {i}{END}" for i in range(ask.samples)]


@pytest.fixture(scope="module")
def leader(tmp_path_factory):
    rollout = dict(agent="a.py:solve", agents_at_once=2)
    cfg = agent_config(tmp_path_factory.mktemp("gateway") / "m", rollout=rollout)
    with Gateway(cfg) as gateway:
        gateway.start()
        with standing_in(gateway, chat_tokenizer("qwen"), write) as leader:
            yield leader


@pytest.fixture
def episode(request, leader):
    """The name of an episode of this test's own, which ends with it."""
    yield request.node.name
    leader.end(request.node.name)


def headers(leader, episode):
    return {"Authorization": f"Bearer {leader.open(episode)}"}


def post(leader, own, body, path="/chat/completions"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(leader.gateway.address + path, content=data, headers=own, timeout=30)


def is_served(leader, episode):
    """Return whether another episode gets its answers."""
    client = leader.client(f"{episode} beside")
    answer = client.chat.completions.create(model="m", messages=QUESTION)
    leader.end(f"{episode} beside")
    return answer.choices[0].message.content == "answer 0"


# --------------------------------------------------------------------------- the protocol


def test_a_chat_completion_has_all_its_parts(leader, episode):
    client = leader.client(episode)
    assert [model.id for model in client.models.list()] == ["policy"]
    answer = client.chat.completions.create(
        model="gpt-x", messages=QUESTION, n=2, logprobs=True, seed=3, max_completion_tokens=7
    )
    assert answer.object == "chat.completion" and answer.model == "gpt-x"
    assert [c.message.content for c in answer.choices] == ["answer 0", "answer 1"]
    assert [c.finish_reason for c in answer.choices] == ["stop", "stop"]
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "answer 0"
    assert [token.logprob for token in tokens] == [-0.5] * len(tokens)
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
    asked = leader.asks[-1]
    assert (asked.episode, asked.samples, asked.max_tokens) == (episode, 2, 7)
    assert leader.tokenizer.decode(asked.tokens) == leader.tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )


def test_max_tokens_are_at_most_those_of_the_run(leader, episode):
    client = leader.client(episode)
    for given in ({}, {"max_tokens": 10**6}):
        client.chat.completions.create(model="m", messages=QUESTION, **given)
        assert leader.asks[-1].max_tokens == 512


def test_a_stream_gives_the_same_answer(leader, episode):
    client = leader.client(episode)
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=QUESTION,
            n=2,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", ""]
    ends = {}
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == ["answer 0", "answer 1"] and ends == {0: "stop", 1: "stop"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def test_an_async_client_streams_tool_calls(leader, episode):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    leader.write = lambda ask: [call + END]
    look = {"type": "function", "function": {"name": "look"}}

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=leader.gateway.address, api_key=leader.open(episode)
        ) as client:
            async with client.chat.completions.stream(
                model="m", messages=QUESTION, tools=[look]
            ) as stream:
                return (await stream.get_final_completion()).choices[0]

    try:
        choice = asyncio.run(ask())
    finally:
        leader.write = write
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"at": 1}'


def test_a_call_that_cannot_be_read_is_text(leader, episode):
    broken = '<tool_call>\n{"name": "look", "argum</tool_call>'
    leader.write = lambda ask: [broken + END]
    try:
        answer = leader.client(episode).chat.completions.create(
            model="m", messages=QUESTION, tools=[{"type": "function", "function": {"name": "look"}}]
        )
    finally:
        leader.write = write
    assert answer.choices[0].message.content == broken
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_text_completions_and_their_stream(leader, episode):
    client = leader.client(episode)
    answer = client.completions.create(model="m", prompt="2+2=", logprobs=0)
    assert answer.choices[0].text == "answer 0"
    assert "".join(answer.choices[0].logprobs.tokens) == "answer 0"
    chunks = client.completions.create(model="m", prompt="2+2=", stream=True)
    assert [chunk.choices[0].text for chunk in chunks] == ["answer 0", ""]


def test_a_refusal_of_the_leader_has_openais_code(leader, episode):
    client = leader.client(episode)
    with pytest.raises(openai.BadRequestError) as caught:
        long = [{"role": "user", "content": "word " * 1000}]
        client.chat.completions.create(model="m", messages=long)
    assert caught.value.code == "context_length_exceeded"
    assert "too long: summarise" in str(caught.value)
    assert client.chat.completions.create(model="m", messages=QUESTION).choices


def test_what_has_no_effect_is_logged_once(leader, episode, caplog):
    client = leader.client(episode)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            message = QUESTION[0] | {"cache_control": {"type": "ephemeral"}}
            client.chat.completions.create(model="m", messages=[message], temperature=0.1)
        until = time.monotonic() + 10
        while "temperature" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
    assert caplog.text.count("agents set temperature in requests, which has no effect") == 1
    assert caplog.text.count("messages[].cache_control") == 1


def show(leader, *pieces, sample=0):
    """Send pieces of the answer to the latest request, as if they were just sampled."""
    until = time.monotonic() + 10
    while not leader.gateway.streams and time.monotonic() < until:
        time.sleep(0.01)
    ((episode, number),) = leader.gateway.streams
    for piece in pieces:
        tokens = leader.tokenizer(piece, add_special_tokens=False)["input_ids"]
        with leader._lock:
            leader.gateway.show(episode, number, sample, tokens)


def texts_of(chunks):
    return [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]


def test_a_stream_comes_while_the_answer_is_sampled(leader, episode):
    leader.write = lambda ask: ["one two, three" + END]
    client = leader.client(episode, timeout=60)
    leader.is_held.set()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(show, leader, "one", " two", ", thr")
            chunks = client.chat.completions.create(
                model="m", messages=QUESTION, stream=True, stop=["three"]
            )
            first = [next(chunks) for _ in range(2)]
            assert first[0].choices[0].delta.role == "assistant"
            assert texts_of(first)[0].startswith("one")  # while the answer is held
        leader.is_held.clear()
        assert "".join(texts_of([*first, *chunks])) == "one two, "
    finally:
        leader.is_held.clear()
        leader.write = write
    assert not leader.gateway.streams
    # The message continues the ids that were sampled.
    answer = {"role": "assistant", "content": "one two, "}
    client.chat.completions.create(model="m", messages=[*QUESTION, answer, *QUESTION])
    assert leader.asks[-1].parent != NO_PARENT


def test_an_episode_that_ends_in_the_middle_of_a_stream_ends_it(leader, episode):
    client = leader.client(episode, timeout=60)
    leader.is_held.set()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(show, leader, "one")
            chunks = client.completions.create(model="m", prompt="2+2=", stream=True)
            assert next(chunks).choices[0].text == "one"
        leader.end(episode)
        with pytest.raises(openai.APIError, match="no episode that is under way"):
            list(chunks)
    finally:
        leader.is_held.clear()
    assert is_served(leader, episode)


def test_an_agent_that_leaves_in_the_middle_of_a_stream_may_go_on(leader, episode):
    client = leader.client(episode, timeout=60)
    leader.is_held.set()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(show, leader, "answer")
            chunks = client.chat.completions.create(model="m", messages=QUESTION, stream=True)
            next(chunks)
        chunks.close()
        show(leader, " ", "0")
    finally:
        leader.is_held.clear()
    until = time.monotonic() + 10
    parents = []
    while not parents or parents[-1] == NO_PARENT:  # until the gateway has the answer
        answer = {"role": "assistant", "content": "answer 0"}
        client.chat.completions.create(model="m", messages=[*QUESTION, answer, *QUESTION])
        parents.append(leader.asks[-1].parent)
        assert time.monotonic() < until
    assert is_served(leader, episode)


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 10**6, "not valid JSON"),
        (b"[]", "must be a JSON object, got a list"),
        (b"\xff\xfe", "not valid JSON"),
        ({}, "messages: must be a list"),
        ({"messages": []}, "messages: must be a list of at least one"),
        ({"messages": "hi"}, "messages: must be a list"),
        ({"messages": [1]}, "messages[0]: expected an object with a role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]: expected"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be a text, got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "only parts of text are supported",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a character"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "4"}]}, "end with a user"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}, *QUESTION]},
            "tool_calls[0]: expected",
        ),
        ({"messages": QUESTION, "n": 10**9}, "n: must be a whole number from 1 to 128"),
        ({"messages": QUESTION, "n": 0}, "n: must be a whole number"),
        ({"messages": QUESTION, "n": True}, "n: must be a whole number"),
        ({"messages": QUESTION, "max_tokens": -1}, "max_tokens: must be"),
        ({"messages": QUESTION, "stop": [""]}, "stop: "),
        ({"messages": QUESTION, "stream": "yes"}, "stream: must be true or false"),
        ({"messages": QUESTION, "logprobs": 3}, "logprobs: must be true or false"),
        ({"messages": QUESTION, "logprobs": True, "top_logprobs": 2}, "top_logprobs: 2"),
        ({"messages": QUESTION, "response_format": {"type": "json_object"}}, "response_format: "),
        ({"messages": QUESTION, "tool_choice": "required"}, "tool_choice: 'required'"),
        ({"messages": QUESTION, "tools": [{"name": "x"}]}, "tools[0]: expected"),
        ({"messages": QUESTION, "tools": "x"}, "tools: must be a list"),
        ({"messages": QUESTION, "model": 3}, "model: must be a text"),
    ],
)
def test_bad_requests_are_refused_by_name(leader, episode, body, says):
    answer = post(leader, headers(leader, episode), body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"], error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [-1], [10**9], {"x": 1}, [[1], [2]]])
def test_bad_prompts_are_refused(leader, episode, prompt):
    answer = post(leader, headers(leader, episode), {"prompt": prompt}, "/completions")
    assert answer.status_code == 400 and "prompt: must be one text" in answer.text


def test_a_wrong_key_is_refused(leader, episode):
    asked = len(leader.asks)
    own = headers(leader, episode)
    wrong = {"Authorization": own["Authorization"][:-1] + "x"}
    for given in (wrong, {}, {"Authorization": "Bearer"}, {"Authorization": b"\xe9"}):
        answer = post(leader, given, {"messages": QUESTION})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    leader.end(episode)
    assert post(leader, own, {"messages": QUESTION}).status_code == 401
    assert len(leader.asks) == asked


def test_the_end_of_an_episode_ends_its_requests(leader, episode):
    own = headers(leader, episode)
    leader.is_held.set()
    try:
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            body = {"messages": QUESTION}
            client.post(
                leader.gateway.address + "/chat/completions", json=body, headers=own, timeout=0.3
            )
        leader.end(episode)
    finally:
        leader.is_held.clear()
    assert post(leader, own, {"messages": QUESTION}).status_code == 401
    assert is_served(leader, episode)


def test_unknown_paths_and_methods_are_refused(leader, episode):
    own = headers(leader, episode)
    address = leader.gateway.address
    assert httpx.get(address + "/files", headers=own).json()["error"]["type"]
    assert httpx.get(address + "/chat/completions", headers=own).status_code == 405
    assert httpx.get(address + "/nothing", headers=own).status_code == 404


# --------------------------------------------------------------------------- who means harm


def test_a_message_of_10_mb_is_refused_before_it_becomes_tokens(leader, episode):
    own = headers(leader, episode)
    large = {"messages": [{"role": "user", "content": "x" * (9 * 2**20)}]}
    answer = post(leader, own, large)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    larger = {"messages": [{"role": "user", "content": "x" * (11 * 2**20)}]}
    answer = post(leader, own, larger)
    assert answer.status_code == 413 and "at most 10 MiB" in answer.text
    many = {"messages": [QUESTION[0]] * 10**5}
    assert post(leader, own, many).json()["error"]["code"] == "context_length_exceeded"
    assert is_served(leader, episode)


def test_a_flood_fails_its_own_episode_alone(leader, episode):
    asked = len(leader.asks)
    own = headers(leader, episode)

    async def one(client):
        url = leader.gateway.address + "/chat/completions"
        try:
            async with client.post(url, json={"messages": QUESTION}) as answer:
                return answer.status
        except aiohttp.ClientConnectionError:
            # Refused by its header, while its body is on the way. Or closed before a slow
            # machine read it: of 500 connections most count as idle.
            return 429

    async def flood():
        connector = aiohttp.TCPConnector(limit=500)
        async with aiohttp.ClientSession(connector=connector, headers=own) as client:
            return await asyncio.gather(*(one(client) for _ in range(500)))

    statuses = asyncio.run(flood())
    assert statuses.count(200) <= 64 and statuses.count(429) >= 500 - 64
    assert len(leader.asks) - asked == 64
    assert is_served(leader, episode)
    state = httpx.get(leader.gateway.address + "/episode", headers=own).json()
    assert 64 < state["requests"] <= 500
    assert "more than rollout.agent_max_requests = 64 answers" in state["fault"]


def test_many_samples_count_as_many_requests(leader, episode):
    own = headers(leader, episode)
    answer = post(leader, own, {"messages": QUESTION, "n": 65})
    assert answer.status_code == 429
    assert answer.headers["x-should-retry"] == "false"


def test_a_client_that_disconnects_is_forgotten(leader, episode):
    asked = len(leader.asks)
    own = headers(leader, episode)
    parts = urlsplit(leader.gateway.address)
    for body, length in ((b'{"messages', 10**6), (json.dumps({"messages": QUESTION}).encode(), 0)):
        with socket.create_connection((parts.hostname, parts.port)) as raw:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                f"{length or len(body)}\r\nAuthorization: {own['Authorization']}\r\n\r\n"
            )
            raw.sendall(head.encode() + body)
    until = time.monotonic() + 10
    while len(leader.asks) == asked and time.monotonic() < until:
        time.sleep(0.01)
    assert len(leader.asks) == asked + 1
    assert is_served(leader, episode)


def test_the_oldest_idle_connections_are_closed_and_none_with_a_request(leader, episode):
    own = headers(leader, episode)
    address = urlsplit(leader.gateway.address)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {own['Authorization']}"
    body = json.dumps({"messages": QUESTION})
    leader.is_held.set()
    with contextlib.ExitStack() as stack:
        stack.callback(leader.is_held.clear)

        def connected(text):
            raw = socket.create_connection((address.hostname, address.port))
            raw.sendall(text.encode())
            return stack.enter_context(raw)

        asking = connected(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}")
        idle = [connected("" if i % 2 else head) for i in range(132)]
        assert idle[0].recv(1) == idle[99].recv(1) == b""  # 32 may stay open
        poller = select.poll()
        for raw in idle[100:]:
            poller.register(raw, select.POLLIN)
        assert not poller.poll(0)
        leader.is_held.clear()
        assert asking.recv(100).startswith(b"HTTP/1.1 200")
    assert is_served(leader, episode)


def test_an_episode_that_begins_again_has_another_key_and_no_earlier_requests(leader, episode):
    first = headers(leader, episode)
    asked = len(leader.asks)
    leader.is_held.set()
    try:
        with pytest.raises(httpx.ReadTimeout):
            url = leader.gateway.address + "/chat/completions"
            httpx.post(url, json={"messages": QUESTION}, headers=first, timeout=0.3)
        again = headers(leader, episode)
        leader._held.clear()
    finally:
        leader.is_held.clear()
    assert post(leader, first, {"messages": QUESTION}).status_code == 401
    assert post(leader, again, {"messages": QUESTION}).status_code == 200
    assert [ask.id for ask in leader.asks[asked:]] == [0]


def test_a_slow_reader_of_a_stream_holds_up_nobody(leader, episode):
    own = headers(leader, episode)
    parts = urlsplit(leader.gateway.address)
    leader.write = lambda ask: ["long " * 50000 + END] * ask.samples
    body = json.dumps({"messages": QUESTION, "n": 3, "stream": True}).encode()
    try:
        raw = socket.create_connection((parts.hostname, parts.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: {own['Authorization']}\r\n\r\n"
        )
        raw.sendall(head.encode() + body)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        leader.write = write
    began = time.monotonic()
    assert is_served(leader, episode)
    assert time.monotonic() - began < 10
    raw.close()


# --------------------------------------------------------------------------- the process


def test_the_process_ends_with_its_parent(tmp_path):
    agent_config(tmp_path / "m")
    script = f"""
        import os, time
        from pathlib import Path
        from spmdrl.agents.gateway import Gateway
        from tests.helpers.gateway_runs import agent_config

        gateway = Gateway(agent_config(Path({str(tmp_path / "m")!r})))
        gateway.start()
        print(gateway._process.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    ) as parent:
        pid = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        parent.kill()
    until = time.monotonic() + 10
    while _is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _is_running(pid)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_it_cannot_load_is_refused_at_start(tmp_path):
    gateway = Gateway(changed(agent_config(tmp_path / "m"), model=dict(tokenizer="nowhere")))
    with pytest.raises(Refusal, match=r"model\.tokenizer: .*nowhere"):
        gateway.start()
    gateway.close()


def test_a_gateway_that_died_is_an_error_of_the_run(tmp_path):
    with gateway_in_thread(agent_config(tmp_path / "m")) as gateway:
        gateway._process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        gateway._link._end.shutdown(socket.SHUT_RDWR)
        with pytest.raises(RuntimeError, match="ended with status 3"):
            gateway.poll()


def test_requests_before_an_episode_began_again_are_dropped(tmp_path):
    with gateway_in_thread(agent_config(tmp_path / "m")) as gateway:
        ask = dict(parent=NO_PARENT, tokens=[5], samples=1, max_tokens=1, stop=[])
        ours, theirs = socket.socketpair()
        with contextlib.closing(FramedSocket(theirs)) as link:
            gateway._link.close()
            gateway._link = FramedSocket(ours)
            gateway.open("e")
            gateway.open("f")
            for kind in ("ask", "opened", "ask"):
                link.put([kind, "e" if kind == "opened" else ask | {"episode": "e", "id": 3}])
            assert [(own.episode, own.id) for own in gateway.poll()] == [("e", 3)]
            link.put(["ask", ask | {"episode": "f", "id": 0}])
            assert not gateway.poll()


# --------------------------------------------------------------------------- the judge


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A gateway of a run whose engine judges."""
    judge = dict(engine="policy", max_prompt_tokens=256, max_response_tokens=32)
    fields = dict(rewards=dict(judge=judge), rollout=dict(agent_max_requests=3))
    cfg = agent_config(tmp_path_factory.mktemp("judge") / "m", **fields)
    with gateway_in_thread(cfg) as gateway:
        with standing_in(gateway, chat_tokenizer("qwen"), lambda ask: [f"Score: 7{END}"]) as leader:
            yield leader


def test_requests_to_a_judge_choose_how_they_are_sampled_and_continue_nothing(asked):
    client = asked.client(JUDGE)
    answer = client.chat.completions.create(model="m", messages=QUESTION)
    assert answer.choices[0].message.content == "Score: 7"
    first = asked.asks[-1]
    assert (first.temperature, first.seed, first.max_tokens) == (0.0, 0, 32)
    own = dict(temperature=0.5, seed=9, max_tokens=7, stop=["x"])
    said = [*QUESTION, {"role": "assistant", "content": "Score: 7"}, *QUESTION]
    for _ in range(4):  # more than agents may ask
        client.chat.completions.create(model="m", messages=said, **own)
    last = asked.asks[-1]
    assert (last.temperature, last.seed, last.max_tokens, last.stop) == (0.5, 9, 7, ("x",))
    assert last.parent == NO_PARENT and len(last.tokens) > 2 * len(first.tokens)
    assert not asked.gateway.poll()


@pytest.mark.parametrize(
    "body, words",
    [
        (dict(top_p=0.5), "top_p: is not honoured here"),
        (dict(temperature=-1), "temperature: must be from 0 to 100"),
        (dict(temperature="hot"), "temperature: must be from 0 to 100"),
        (dict(seed=-1), "seed: must be a whole number from 0"),
        (dict(tools=[{"type": "function", "function": {"name": "f"}}]), "tools: a judge has none"),
        (dict(response_format={"type": "json_object"}), "response_format: "),
    ],
)
def test_what_a_judge_does_not_honour_is_refused(body, words, asked):
    own = {"Authorization": f"Bearer {asked.open(JUDGE)}"}
    answer = post(asked, own, {"model": "m", "messages": QUESTION} | body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_reward_function_asks_the_engine_of_its_run(asked, monkeypatch):
    for name, value in judge_variables(asked.gateway.address, asked.open(JUDGE)).items():
        monkeypatch.setenv(name, value)
    own = judge(url="engine", template="{prompt}: {response}?")
    own.prepare()
    assert own(["2+2="], ["4"], log_extra=None, answer=["4"]) == [0.7]
    assert "2+2=: 4?" in asked.tokenizer.decode(asked.asks[-1].tokens)
    assert asked.asks[-1].temperature == 0


def test_a_run_without_a_judge_is_told_so(tmp_path, monkeypatch):
    monkeypatch.delenv(JUDGE_URL, raising=False)
    own = judge(url="engine")
    for call in (own.prepare, lambda: own(["a"], ["b"])):
        with pytest.raises(Refusal, match="rewards.judge.engine: none, and a reward function asks"):
            call()
    (tmp_path / "r.py").write_text(
        "from spmdrl.rewards.judge import judge\nown = judge(url='engine')\n"
    )
    (found,) = function_problems([f"{tmp_path}/r.py:own"], [])
    assert "rewards.judge.engine: none" in found
    monkeypatch.setenv(JUDGE_URL, "")  # what the check sets is undone
    monkeypatch.setenv(JUDGE_KEY, "")
    assert not function_problems([f"{tmp_path}/r.py:own"], [], has_judge=True)
    for options in (dict(model="m"), dict(cache="memory"), dict(api_key_env="K")):
        with pytest.raises(Refusal, match=f"{next(iter(options))}: has no effect on the run's own"):
            judge(url="engine", **options)
    with pytest.raises(Refusal, match="model: is empty"):
        judge(url="http://a/v1")


def test_a_judge_needs_a_chat_template(tmp_path):
    from transformers import AutoTokenizer

    cfg = agent_config(tmp_path / "m", rewards=dict(judge=dict(engine="policy")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    make_judge_chat(cfg, tokenizer, stops=[tokenizer.eos_token_id])
    tokenizer.chat_template = None
    with pytest.raises(Refusal, match="rewards.judge.engine: policy, and .* no chat template"):
        make_judge_chat(cfg, tokenizer, stops=[])
