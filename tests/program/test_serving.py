"""Other programs ask the policy while train.py trains it."""

from __future__ import annotations

import json
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from spmdrl.agents.server import QUEUED
from tests.helpers.built import small_model
from tests.helpers.runs import TINY, Run, finish, metrics, run, start, wait_for
from tests.program.test_train import assert_same_end
from tests.rollout.timed_runs import rollouts_of

REWARD = """
import pathlib, time

HOLD = pathlib.Path(__file__).with_name("hold")

def grade(data_source, solution_str, ground_truth, extra_info=None):
    while HOLD.exists():
        time.sleep(0.02)
    return sum(map(ord, solution_str)) % 7 / 7
"""
PLACES = 2
FLAGS = TINY["rl"] | {
    "layout.placement": "colocated",
    "lag": 0,
    "engine.kind": "transformers",
    "engine.exact": "true",
    "algorithm.correction": "none",
    "data.max-prompt-tokens": 40,
    "sampling.max-response-tokens": 16,
    "batch.prompts-per-step": 4,
    "rewards.timeout-s": 600,
    "rollout.record.every": 1,
    "steps": 2,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "transformers": (1, {}),
    "vllm": (1, {"engine.kind": "vllm"}),
    "vllm, split": (2, {"engine.kind": "vllm", "layout.placement": "split"}),
    "two replicas": (3, {"layout.placement": "split", "layout.trainer-ranks": 1}),
    "vllm, engine of two ranks, ahead": (
        4,
        {
            "engine.kind": "vllm",
            "layout.placement": "split",
            "layout.trainer-ranks": 2,
            "layout.inference-tp": 2,
            "lag": 1,
            "engine.exact": "false",
            "deterministic": "false",
        },
    ),
}
"""Of each its ranks and its flags."""
QUESTION: list[Any] = [{"role": "user", "content": "2+2?"}]


def access_to(under_way: Run, out: Path, *, replica: int = 0) -> dict[str, str]:
    """Return the address and the key of a run, when it has written them."""
    file = out / "serve" / f"replica_{replica}.json"
    wait_for(under_way, lambda: file.exists() and file.read_text(), "no address", timeout_s=200)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return json.loads(file.read_text())


def client_of(access: dict[str, str]) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=access["base_url"], api_key=access["api_key"], max_retries=0, timeout=200
    )


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=QUESTION, **options)


def check_answers(client: openai.OpenAI) -> None:
    """Check what the endpoint understands."""
    assert client.models.list().data
    first = ask(client, seed=5, max_tokens=8, logprobs=True)
    choice = first.choices[0]
    assert first.usage.completion_tokens >= 1 and choice.logprobs.content[0].logprob <= 0
    both = ask(client, seed=5, max_tokens=8, n=2)
    assert both.choices[0].message.content == choice.message.content
    assert both.choices[1].message.content != choice.message.content
    chunks = [*ask(client, seed=5, max_tokens=8, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content and len(chunks) > 3
    assert client.completions.create(model="m", prompt="2+2=", max_tokens=3).choices[0].text
    for body, words in [
        (dict(top_p=0.5), "top_p: is not honoured here"),
        (dict(temperature=-1), "temperature: must be from 0"),
    ]:
        with pytest.raises(openai.BadRequestError, match=words):
            ask(client, **body)


def flood(client: openai.OpenAI) -> int:
    """Ask more than may wait at once; return how many were refused."""

    def one(_: int) -> bool:
        try:
            ask(client, max_tokens=8)
        except openai.RateLimitError:
            return True
        return False

    with ThreadPoolExecutor(QUEUED + 20) as threads:
        return sum(threads.map(one, range(QUEUED + 20)))


@pytest.mark.parametrize(
    "layout",
    [
        "transformers",
        *(pytest.param(own, marks=pytest.mark.grid) for own in LAYOUTS if own != "transformers"),
    ],
)
@pytest.mark.timeout(600)
@pytest.mark.proves("serve", "colocated", "record", "transformers")
@pytest.mark.proves("serve", "split", "record")
@pytest.mark.proves("serve", "split", "record", "lag", "inference_tp")
def test_other_programs_are_answered_and_change_no_number(layout, tmp_path):
    ranks, own = LAYOUTS[layout]
    model = small_model(
        tmp_path / "model", hidden_size=64, heads=2, initializer_std=0.2, chat_template=True
    )
    (tmp_path / "r.py").write_text(REWARD)
    flags = FLAGS | own | {"model.path": model, "rewards.functions": f"{tmp_path}/r.py:grade"}
    alone = tmp_path / "alone"
    run("demo_grpo.yaml", ranks, **flags | {"output-dir": alone})
    hold = tmp_path / "hold"
    hold.touch()
    served = tmp_path / "served"
    flags |= {"output-dir": served, "rollout.serve": PLACES}
    under_way = start("demo_grpo.yaml", ranks, **flags)
    access = access_to(under_way, served)
    client = client_of(access)
    check_answers(client)
    assert flood(client) > 0
    stranger = httpx.get(f"{access['base_url']}/models", headers={"Authorization": "Bearer x"})
    assert stranger.status_code == 401
    has_ended = threading.Event()
    answered = []

    def insist() -> None:
        while not has_ended.is_set():
            try:
                answered.append(ask(client, max_tokens=16))
            except openai.OpenAIError:
                time.sleep(0.05)

    threads = [threading.Thread(target=insist) for _ in range(3 * PLACES)]
    for thread in threads:
        thread.start()
    hold.unlink()
    finished = finish(under_way, timeout_s=300)
    has_ended.set()
    for thread in threads:
        thread.join()
    assert finished.status == 0, finished.output[-4000:]
    assert answered and access["base_url"] in finished.output
    assert not [*served.glob("serve/*")]
    rows = metrics(served)
    assert rows[0]["serve/requests"] >= QUEUED and rows[0]["serve/tokens"] > QUEUED
    assert sum(row["serve/requests"] for row in rows[1:]) > 0
    if "deterministic" in own:
        return  # last bits depend on who asks
    assert_same_end(alone, served)
    assert rollouts_of(alone) == rollouts_of(served)
