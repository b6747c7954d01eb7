"""A headless Chromium for tests of pages, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
_DEADLINE_S = 20.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--window-size=1280,900",
)


class Browser:
    """One tab. What the page writes to its console as an error, and what it throws, is kept."""

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        """Addresses that were asked for."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        end = time.monotonic() + _DEADLINE_S
        while time.monotonic() < end:
            message = json.loads(self._socket.recv(timeout=_DEADLINE_S))
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._hear(message)
        raise TimeoutError(method)

    def _hear(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:1000])
        elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.errors.append(json.dumps(parameters["args"])[:1000])
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def run(self, code: str) -> Any:
        """Return the value of a JavaScript expression; of a promise, what it becomes."""
        result = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, json.dumps(result["exceptionDetails"])[:1000]
        return result["result"].get("value")

    def wait(self, code: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _DEADLINE_S
        while time.monotonic() < end:
            if self.run(f"Boolean({code})"):
                return
            time.sleep(0.02)
        text = self.run("document.body.innerText.slice(0, 2000)")
        raise AssertionError(f"{code} did not become true; errors: {self.errors}; page: {text}")

    def open(self, page: Path, place: str = "") -> float:
        """Load a page and return the seconds until it is drawn."""
        self.call("Page.navigate", url="about:blank")
        self.errors.clear()
        self.requests.clear()
        began = time.monotonic()
        self.call("Page.navigate", url=f"{page.resolve().as_uri()}#{place}")
        self.wait("document.body && document.body.dataset.ready")
        return time.monotonic() - began

    def go(self, place: str) -> None:
        """Go to a place of the open page."""
        self.run(f"location.hash = {json.dumps(place)}; 1")
        self.settle()

    def settle(self) -> None:
        """Wait until everything that was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))")

    def text(self, selector: str = "#page") -> str:
        """Return the text that an element shows."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Click on an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def key(self, name: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path, *, dark: bool = False) -> None:
        """Write what the window shows as a PNG."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser whose files are in `folder`; it ends with the block."""
    assert CHROMIUM
    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = _port(folder / "DevToolsActivePort")
        with connect(_tab(port), max_size=None, proxy=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _port(file: Path) -> str:
    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if lines := file.read_text().splitlines():
                return lines[0]
        time.sleep(0.05)
    raise TimeoutError("chromium did not start")


def _tab(port: str) -> str:
    """Return the address of the first tab."""
    import httpx

    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        tabs = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
        for tab in tabs:
            if tab["type"] == "page":
                return tab["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise TimeoutError("chromium has no tab")
