"""A headless Chromium for tests, driven through its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
_FLAGS += ("--disable-background-networking", "--disable-component-update")
_KEYS = {" ": 32, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowRight": 39}


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
        level = event.get("type") or event.get("entry", {}).get("level")
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown" or (
            method in ("Runtime.consoleAPICalled", "Log.entryAdded")
            and level in ("error", "warning")
        ):
            self.problems.append(json.dumps(event)[:1000])

    def open(self, path: Path) -> None:
        """Load a file and wait until it is shown."""
        self._call("Page.navigate", url=path.as_uri())
        expected = f"complete{path.as_uri()}"
        wait(lambda: self.run("document.readyState + location.href") == expected, "page loads")

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
            fields = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper()))}
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


def wait(ready: Callable[[], bool], what: str) -> None:
    """Wait for something to happen."""
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.05)


@contextmanager
def chromium() -> Iterator[Tab]:
    """Start a browser with a profile of its own; end it with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], **silent)
        try:
            file = Path(profile) / "DevToolsActivePort"
            wait(lambda: file.exists() and bool(file.read_text()), "port of Chromium")
            address = f"http://127.0.0.1:{file.read_text().split()[0]}/json/list"
            with urllib.request.urlopen(address, timeout=30) as answer:
                targets = json.load(answer)
            (page,) = [target for target in targets if target["type"] == "page"]
            with connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None) as connection:
                yield Tab(connection)
        finally:
            process.kill()
            process.wait()
