"""Waiting for processes: as long as they make progress, no longer."""

import subprocess
import sys

import psutil
import pytest

from tests import processes

BUSY = "while True: pass"
IDLE = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "limits", "message"),
    [
        ("print('last words', flush=True); raise SystemExit(3)", (60, 60), "ended with status 3"),
        (BUSY, (2, 60), "not ready within 2 s"),
        (IDLE, (60, 2), "no progress for 2 s"),
    ],
    ids=["ended", "too slow", "idle"],
)
def test_a_wait_ends_with_an_error(tmp_path, monkeypatch, code, limits, message):
    limit, idle_limit = limits
    monkeypatch.setattr(processes, "IDLE_LIMIT_S", idle_limit)
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=stream, start_new_session=True
        )
    try:
        with pytest.raises(RuntimeError, match=message) as caught:
            processes.wait_for(lambda: False, process, log, limit)
    finally:
        processes.end(process)
    assert ("last words" in str(caught.value)) == (message == "ended with status 3")
    assert process.returncode is not None


def test_a_program_that_fails_says_what_it_printed():
    with pytest.raises(AssertionError, match="no such thing"):
        processes.run_python("-c", "raise SystemExit('no such thing')")


def test_no_process_outlives_a_program_that_does_not_end(tmp_path, monkeypatch):
    """A server that the program started in a session of its own, too."""
    written = tmp_path / "pid"
    start = f"subprocess.Popen({[sys.executable, '-c', IDLE]!r}, start_new_session=True).pid"
    write = f"pathlib.Path({str(written)!r}).write_text(str({start}))"
    monkeypatch.setattr(processes, "IDLE_LIMIT_S", 2.0)
    with pytest.raises(RuntimeError, match="no progress"):
        processes.run_python("-c", f"import pathlib, subprocess, time\n{write}\n{IDLE}")
    assert not psutil.pid_exists(int(written.read_text()))
