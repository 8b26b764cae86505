"""A headless Chromium for tests, driven through its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
_KEYS = {" ": ("Space", 32), "Home": ("Home", 36), "End": ("End", 35)}
_KEYS |= {"ArrowLeft": ("ArrowLeft", 37), "ArrowRight": ("ArrowRight", 39), "Tab": ("Tab", 9)}


class Tab:
    """One tab of a browser.

    Attributes:
        problems: uncaught exceptions, errors on the console, and violations of the page's policy.
        requests: addresses that were asked for.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._take(answer.get("method"), answer.get("params", {}))

    def _take(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"])[:1000])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.problems.append(json.dumps(event["args"])[:1000])
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])

    def open(self, path: Path) -> None:
        """Load a file and wait until it is shown."""
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 30
        while self.run("document.readyState + location.href") != f"complete{path.as_uri()}":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def look(self, width: int = 1360, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window and the user's color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """Press and release a key."""
        code, number = _KEYS.get(key, (f"Key{key.upper()}", ord(key[0].upper())))
        fields = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def point(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Return a point of an element's first line, as shares of its width and height."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        return box[0] + x * box[2], box[1] + y * box[3]

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse button at one point and release it at another."""
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        for kind, (x, y) in (
            ("mousePressed", start),
            ("mouseMoved", middle),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1,
                clickCount=1,
            )  # fmt: skip

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click an element."""
        place = self.point(selector, x, y)
        self.drag(place, place)


@contextmanager
def chromium() -> Iterator[Tab]:
    """Start a browser with a profile of its own; end it with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = _port(process, Path(profile) / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
                targets = json.load(answer)
            (page,) = [target for target in targets if target["type"] == "page"]
            with connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None) as connection:
                yield Tab(connection)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[bytes], file: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"chromium ended with status {process.returncode}"
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError("chromium opens no port for its DevTools protocol")
