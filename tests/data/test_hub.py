"""Names that are no folder: the disk first, then the hub, once and briefly."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from spmdrl.check.inputs import input_problems
from spmdrl.data import hub
from spmdrl.data.hub import find_on_hub
from spmdrl.data.tokenizer import read_tokenizer
from spmdrl.model.load import load_hf_config
from tests.helpers.built import made, refused

SOON_S = 20.0
"""For a machine that is slow; the hub's client would try for over a minute."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Ask anew, and find an empty cache."""
    hub._problem.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield
    hub._problem.cache_clear()


class Hub:
    """A hub that answers every question alike, and counts them."""

    def __init__(self, status: int):
        self.asked: list[str] = []
        outer = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def absent(monkeypatch) -> Iterator[Hub]:
    """A hub that has nothing."""
    found = Hub(404)
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_model_that_the_hub_does_not_have_is_refused_after_one_question(absent):
    began = time.monotonic()
    for work in (lambda: load_hf_config("owner/mispelt"), lambda: read_tokenizer("owner/mispelt")):
        with refused("no folder 'owner/mispelt' here", "no model 'owner/mispelt' that can be read"):
            work()
    asked = [path for path in absent.asked if path.startswith("/api/models")]
    assert asked == ["/api/models/owner/mispelt"]
    assert time.monotonic() - began < SOON_S
    with refused("data: there is no folder 'owner/rows' here", "no dataset 'owner/rows'"):
        find_on_hub("owner/rows", field="data", kind="dataset")


def test_held_out_rows_that_the_hub_does_not_have_are_refused_before_a_run(absent, tiny_model):
    data = dict(train="task:addition", size=9, eval="owner/held_out", max_prompt_tokens=16)
    cfg = made(data=data, model=dict(path=str(tiny_model)), batch=dict(prompts_per_step=2))
    found = list(input_problems(cfg, opens_all=False))
    assert any("data.eval: there is no folder 'owner/held_out' here" in text for text in found)


def test_a_hub_that_is_not_there_is_waited_for_briefly(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(hub, "_DEADLINE_S", 0.5)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with refused(
            "model.path: there is no folder 'owner/model' here", "did not answer in 0.5 s"
        ):
            load_hf_config("owner/model")
        assert time.monotonic() - began < SOON_S
    with refused("did not answer", "fetch it where there is a network"):  # and with nobody there
        find_on_hub("owner/other", field="model.path")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused("HF_HUB_OFFLINE is set"):
        find_on_hub("owner/third", field="model.path")


def test_what_is_in_the_cache_is_taken_where_the_hub_is_out_of_reach(tmp_path, monkeypatch, caplog):
    snapshot = tmp_path / "cache" / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    find_on_hub("owner/model", field="model.path")
    assert "taken from the cache" in caplog.text and constants.HF_HUB_OFFLINE


def test_a_folder_is_never_asked_for(tmp_path, absent):
    (tmp_path / "model").mkdir()
    find_on_hub(str(tmp_path / "model"), field="model.path")
    assert not absent.asked
