"""Files that somebody writes to while they are used."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.unit import numbers_file
from vllm_trie.files import sealed_copy, watched_file
from vllm_trie.files.watched_file import WatchedFile
from vllm_trie.refusal import RefusedError


def open_numbers(path: Path) -> Callable[[], Any]:
    content = numbers_file.FORMAT.read(path)
    return lambda: int(content.body.sum())


def truncate(path: Path, whole: bytes) -> None:
    os.truncate(path, 0)


def copy_over(path: Path, whole: bytes) -> None:
    shutil.copyfile(__file__, path)


def write_over(path: Path, whole: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(len(whole) // 3)
        file.write(b"\xff" * (len(whole) // 3))


@pytest.mark.parametrize("damage", [truncate, copy_over, write_over])
def test_content_in_use_stays(tmp_path, damage, plugin_log, monkeypatch):
    """However the file is changed in place; one warning, and complete files are taken up."""
    monkeypatch.setattr(watched_file, "INTERVAL", 0.0)
    path = numbers_file.write(tmp_path / "file", 3000)
    whole = path.read_bytes()
    opening, waits = threading.Lock(), []

    def open_alone(path: Path) -> Callable[[], Any]:
        waits.append(opening.locked())
        with opening:
            return open_numbers(path)

    with plugin_log.at_level(logging.INFO, logger="vllm.vllm_trie.files.watched_file"):
        watched = WatchedFile(path, open_alone, "the file")
        expected = watched.latest()()
        for _ in range(40):
            damage(path, whole)
            assert watched.latest()() == expected
            path.write_bytes(whole)
            assert watched.latest()() == expected
        levels = [record.levelname for record in plugin_log.records]
        assert levels.count("WARNING") == 1
        assert "ERROR" not in levels
        plugin_log.clear()
        path.with_suffix(".new").write_bytes(whole)
        path.with_suffix(".new").replace(path)
        deadline = time.monotonic() + 30
        while "was replaced" not in plugin_log.text and time.monotonic() < deadline:
            assert watched.latest()() == expected
        assert "was replaced" in plugin_log.text
    assert not any(waits), "versions were opened at the same time"


def test_a_file_that_is_complete_again_is_taken_up(tmp_path, monkeypatch):
    """Even if the last write has the time of one that was seen."""
    monkeypatch.setattr(watched_file, "INTERVAL", 0.0)
    path = numbers_file.write(tmp_path / "file", 3000)
    whole = numbers_file.write(tmp_path / "other", 1).read_bytes()
    watched = WatchedFile(path, numbers_file.read, "the file")
    size = path.stat().st_size
    path.write_bytes(b"x" * len(whole))
    now = time.time_ns()
    os.utime(path, ns=(now, now))
    watched.latest()
    watched._thread.join()
    path.write_bytes(whole)
    os.utime(path, ns=(now, now))
    watched.latest()
    watched._thread.join()
    assert size != len(whole)
    assert watched.latest() == [0]


def test_a_version_that_could_not_be_read_is_tried_again(tmp_path, monkeypatch, plugin_log):
    """Later, as where a network failed for a moment; each fault is an error once."""
    monkeypatch.setattr(watched_file, "INTERVAL", 0.0)
    path = numbers_file.write(tmp_path / "file", 3000)
    watched = WatchedFile(path, numbers_file.read, "the file")
    numbers_file.write(tmp_path / "other", 2).replace(path)
    now, reasons = time.monotonic(), ["denied", "denied", "stale", "stale"]

    def fail(*_: object) -> None:
        raise OSError(116, reasons.pop())

    monkeypatch.setattr(time, "monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        for left in (3, 2, 1, 0):
            watched.latest()
            watched._thread.join()
            assert len(watched.latest()) == 3000
            watched._thread.join()
            assert len(reasons) == left
            now += 11
    records = [r for r in plugin_log.records if r.levelno > logging.DEBUG]
    assert [record.levelname for record in records] == ["ERROR"] * 2
    watched.latest()
    watched._thread.join()
    assert len(watched.latest()) == 2


def test_what_is_opened_during_a_copy_is_whole(tmp_path):
    path = numbers_file.write(tmp_path / "file", 3000)
    whole = path.read_bytes()
    expected = open_numbers(path)()
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            path.write_bytes(whole)

    thread = threading.Thread(target=copy)
    thread.start()
    results = []
    try:
        for _ in range(40):
            try:
                results.append(open_numbers(path)())
            except ValueError:
                continue
    finally:
        stop.set()
        thread.join()
    assert all(result == expected for result in results)


@pytest.mark.parametrize("can_seal", [True, False])
def test_processes_share_a_copy(tmp_path, can_seal, monkeypatch):
    """A worker opens what the scheduler has checked, whatever has become of the file."""
    monkeypatch.setattr(sealed_copy, "_CAN_SEAL", can_seal)
    path = numbers_file.write(tmp_path / "file", 2400)
    content = numbers_file.FORMAT.read(path)
    path.unlink()
    program = (
        "import sys; from pathlib import Path; from tests.unit.numbers_file import FORMAT\n"
        "print(FORMAT.read(Path(sys.argv[1]), check=False).header.count)"
    )
    command = [sys.executable, "-c", program, content.copy]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert result.stdout == b"2400\n"
    if can_seal:
        with pytest.raises(PermissionError):
            os.truncate(content.copy, 0)
    memory = Path(content.copy)
    del content
    with pytest.raises(RefusedError):
        numbers_file.read(memory)
