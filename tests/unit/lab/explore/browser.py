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
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
_FLAGS += ("--disable-background-networking", "--disable-component-update")
_KEYS = {" ": ("Space", 32), "Home": ("Home", 36), "End": ("End", 35)}
_KEYS |= {"ArrowLeft": ("ArrowLeft", 37), "ArrowRight": ("ArrowRight", 39)}


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
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> Any:
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
        self._call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 30
        while self.run("document.readyState + location.href") != f"complete{path.as_uri()}":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of the first element that a selector matches."""
        text: str = self.run(f"document.querySelector({json.dumps(selector)}).textContent")
        return text

    def count(self, selector: str) -> int:
        """Return the number of elements that a selector matches."""
        number: int = self.run(f"document.querySelectorAll({json.dumps(selector)}).length")
        return number

    def press(self, *keys: str) -> None:
        """Press and release keys, one after another."""
        for key in keys:
            code, number = _KEYS.get(key, (f"Key{key.upper()}", ord(key[0].upper())))
            fields = {"key": key, "code": code, "windowsVirtualKeyCode": number}
            text = {"text": key} if len(key) == 1 else {}
            self._call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
            self._call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, **where)


@contextmanager
def chromium() -> Iterator[Tab]:
    """Start a browser with a profile of its own; end it with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], **silent)
        try:
            port = _port(process, Path(profile) / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
                targets = json.load(answer)
            (page,) = [target for target in targets if target["type"] == "page"]
            with connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None) as connection:
                yield Tab(connection)
        finally:
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
