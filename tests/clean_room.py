"""What README and docs/cpu.md tell a newcomer to type, from an empty home.

The fenced commands and Python blocks are taken from the pages and run as they stand, in a folder
that looks like the checkout and holds `MODEL` and `HEADS`, the model that ships and its heads. They
are shortened by environment variables, and `vllm serve` by a script of that name, which adds
options. `curl` finds the server at another port by its own configuration file.

    python -m tests.clean_room [PAGE...]
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT, end, wait_for
from tests.unit.docs.pages import Page, page
from vllm_trie.lab.tiny_model import medusa_path, model_path

PAGES = ("README.md", "docs/cpu.md")
NOT_RUN = {
    "pip install .": "would replace the plugin that the tests run; tests/engine/test_wheel.py "
    "builds the wheel and installs it elsewhere",
    "vllm serve MODEL --spec-method ngram_trie": "is run below, with another model",
}
"""Beginnings of the commands that cannot run here, and why."""
SHORTER = {
    "ARGS": "--max-tokens 8 --repeats 1 --batch-size 4",  # of make demo
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles a model for minutes
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
SERVER_OPTIONS = (
    "--enforce-eager --max-model-len 512 --max-num-seqs 8 --kv-cache-memory-bytes 64M "
    '--override-generation-config {"max_new_tokens":32}'
)
_SERVER = re.compile(r"\bvllm serve\b")


class Step(NamedTuple):
    """A command or a Python block of a page."""

    text: str
    reason: str | None = None
    """Why it is not run."""


class Outcome(NamedTuple):
    """What became of a step; the last one of a page that fails ends it."""

    text: str
    seconds: float
    output: str


def steps_of(document: Page) -> list[Step]:
    """Return what a page tells to type, in its order."""
    steps = []
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", document.text, re.S | re.M):
        if language == "python":
            script = f"cat > snippet.py <<'END_OF_SNIPPET'\n{body}END_OF_SNIPPET\n"
            steps.append(Step(f"{script}python snippet.py"))
        elif language in ("bash", "sh", "console"):
            for command in re.findall(r"(?:[^\n]*\\\n)*[^\n]+", body):
                reasons = (why for start, why in NOT_RUN.items() if command.startswith(start))
                steps.append(Step(command, next(reasons, None)))
    return steps


class Room:
    """An empty home, and a folder with the files of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.checkout = folder / "checkout"
        self.log = folder / "log"
        self.home.mkdir()
        self.checkout.mkdir()
        for path in ROOT.iterdir():
            if path.name not in (".venv", ".git"):
                (self.checkout / path.name).symlink_to(path)
        (self.checkout / "MODEL").symlink_to(model_path())
        (self.checkout / "HEADS").symlink_to(medusa_path())
        self._make_environment(Path(sys.prefix))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (self.home / ".curlrc").write_text(
            f'connect-to = "localhost:8000:127.0.0.1:{self.port}"\nnoproxy = "*"\n'
        )

    def _make_environment(self, real: Path) -> None:
        """Make `.venv`, whose programs are those of this environment, but for `vllm`."""
        bin_folder = self.checkout / ".venv" / "bin"
        bin_folder.mkdir(parents=True)
        for name in ("lib", "include", "pyvenv.cfg"):
            if (real / name).exists():
                (bin_folder.parent / name).symlink_to(real / name)
        for program in (real / "bin").iterdir():
            if program.name != "vllm":
                (bin_folder / program.name).symlink_to(program)
        script = bin_folder / "vllm"
        script.write_text(
            f'#!/bin/sh\n[ "$1" = serve ] || exec {real}/bin/vllm "$@"\n'
            f"echo $$ > {self.log.parent}/server.pid\n"
            f'exec {real}/bin/vllm "$@" --port "$ROOM_PORT" $ROOM_OPTIONS\n'
        )
        script.chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a newcomer who has pip's settings of this machine."""
        kept = re.compile(r"PIP_.*|UV_.*|LANG|TMPDIR|SSL_CERT_FILE|.*_proxy|.*_PROXY")
        inherited = {name: value for name, value in os.environ.items() if kept.fullmatch(name)}
        settings = Path.home() / ".config" / "pip" / "pip.conf"
        if settings.exists():
            inherited.setdefault("PIP_CONFIG_FILE", str(settings))
        return {
            "PATH": f"{self.checkout}/.venv/bin:{os.environ['PATH']}",
            "HOME": str(self.home),
            "ROOM_PORT": str(self.port),
            "ROOM_OPTIONS": SERVER_OPTIONS,
            **inherited,
            **SHORTER,
            **variables,
        }

    @contextmanager
    def running(self, script: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a script of bash in the checkout while the block runs; ends what it has started."""
        with self.log.open("ab") as stream:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.checkout,
                env=self.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            end(process)

    def run(self, script: str, **variables: str) -> str:
        """Run a script of bash to its end; return what it printed.

        Raises:
            RuntimeError: It failed or stood still.
        """
        with self.running(script, **variables) as process:
            wait_for(lambda: process.poll() == 0, process, self.log)
        return self.log.read_text(errors="replace")


_HEAD = """set -euo pipefail
stop() { if [ -e "$PID" ]; then kill "$(cat "$PID")"; wait || true; rm "$PID"; fi; }
ready() {
    until curl -sf localhost:8000/health; do kill -0 $!; sleep 0.5; done
}
mark() { printf '\\n<<< %s %s\\n' "$1" "$(date +%s.%N)"; }
"""


def script_of(steps: list[Step]) -> str:
    """Return a script of bash that runs the steps; servers in the background until the next step
    that asks them nothing."""
    parts = [_HEAD]
    for number, step in enumerate(steps):
        parts.append(f"mark {number}")
        if not step.text.startswith("curl"):
            parts.append("stop")
        if _SERVER.search(step.text):
            parts.append(f"{{ {step.text}\n}} &\nready")
        else:
            parts.append(step.text)
    return "\n".join([*parts, "stop", "mark end"]) + "\n"


def run_page(name: str, folder: Path, **variables: str) -> list[Outcome]:
    """Run the steps of a page in a new room.

    Raises:
        RuntimeError: A step failed; the message ends with its output.
    """
    steps = [step for step in steps_of(page(name)) if step.reason is None]
    room = Room(folder)
    printed = room.run(script_of(steps), PID=str(folder / "server.pid"), **variables)
    marks = re.split(r"^<<< (?:\d+|end) ([\d.]+)\n", printed, flags=re.M)[1:]
    times, outputs = [float(mark) for mark in marks[::2]], marks[1::2]
    return [
        Outcome(step.text, round(after - before, 1), output)
        for step, before, after, output in zip(steps, times, times[1:], outputs, strict=False)
    ]


def main() -> None:
    """Run pages and print what their steps took and printed last."""
    for name in sys.argv[1:] or PAGES:
        print(f"== {name}", flush=True)
        for step in steps_of(page(name)):
            if step.reason is not None:
                print(f"not run: {step.text.splitlines()[0]}: {step.reason}")
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            for outcome in run_page(name, Path(folder)):
                print(f"{outcome.seconds:6.1f} s  {outcome.text}")
                print("".join(f"    | {line}\n" for line in outcome.output.splitlines()[-12:]))
            print(f"{time.monotonic() - start:6.1f} s  {name}")


if __name__ == "__main__":
    if shutil.which("curl") is None:
        sys.exit("the pages use curl: install it")
    main()
