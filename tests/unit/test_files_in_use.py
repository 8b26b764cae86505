"""Corpora and catalogues that somebody writes to while they are used."""

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

import numpy as np
import pytest

from tests.extras.items.unit.catalogues import write
from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngrams import Job, NativeBackend
from vllm_trie.extras.corpus.corpus_file import open_corpus, write_corpus
from vllm_trie.extras.items import ItemsError, ItemTrie, open_items
from vllm_trie.files import sealed_copy
from vllm_trie.files.watched_file import WatchedFile

ITEMS = {(a, b): 10 * a + b for a in range(60) for b in range(40)}
TEXT = np.arange(20_000, dtype=np.int32) % 997


def open_catalogue(path: Path) -> Callable[[], Any]:
    trie = open_items(path)
    return lambda: (trie.num_items, trie.find(np.array([7, 8])), int(trie.values.sum()))


def open_drafts(path: Path) -> Callable[[], Any]:
    backend, corpus = NativeBackend(BLEND), open_corpus(path)

    def draft() -> Any:
        tokens = TEXT[100:110].copy()
        job = Job(backend.new_index(8), None, corpus, tokens, len(tokens), 16, 9, False)
        return backend.draft_batch([job])[0].tree.token_ids.tolist()

    return draft


@pytest.fixture(params=["catalogue", "corpus"])
def opened(request, tmp_path):
    """A file and the function that opens it and returns how to use it."""
    path = tmp_path / "file"
    if request.param == "catalogue":
        return write(path, ITEMS), open_catalogue
    write_corpus(path, [TEXT], 1000, "tokenizer")
    return path, open_drafts


def truncate(path: Path, whole: bytes) -> None:
    os.truncate(path, 0)


def copy_over(path: Path, whole: bytes) -> None:
    shutil.copyfile(__file__, path)


def write_over(path: Path, whole: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(len(whole) // 3)
        file.write(b"\xff" * (len(whole) // 3))


@pytest.mark.parametrize("damage", [truncate, copy_over, write_over])
def test_content_in_use_stays(opened, damage, caplog):
    """However the file is changed in place; one warning, and complete files are taken up."""
    path, open_file = opened
    whole = path.read_bytes()
    with caplog.at_level(logging.INFO, logger="vllm_trie.files.watched_file"):
        watched = WatchedFile(path, open_file, "the file")
        expected = watched.latest()()
        for _ in range(40):
            damage(path, whole)
            assert watched.latest()() == expected
            path.write_bytes(whole)
            assert watched.latest()() == expected
        # A record arrives twice where the plugin passes it on to vLLM's logger, too.
        levels = [record.levelname for record in dict.fromkeys(caplog.records)]
        assert levels.count("WARNING") == 1
        assert "ERROR" not in levels
        caplog.clear()
        path.with_suffix(".new").write_bytes(whole)
        path.with_suffix(".new").replace(path)
        deadline = time.monotonic() + 30
        while "was replaced" not in caplog.text and time.monotonic() < deadline:
            assert watched.latest()() == expected
        assert "was replaced" in caplog.text


def test_a_file_that_is_complete_again_is_taken_up(tmp_path):
    """Even if the last write has the time of one that was seen."""
    path = write(tmp_path / "items", ITEMS)
    whole = write(tmp_path / "other", {(1, 2): 3}).read_bytes()
    watched = WatchedFile(path, open_items, "the catalogue")
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
    assert watched.latest().num_items == 1


def test_what_is_opened_during_a_copy_is_whole(opened):
    path, open_file = opened
    whole = path.read_bytes()
    expected = open_file(path)()
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
                results.append(open_file(path)())
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
    path = write(tmp_path / "items", ITEMS)
    trie: ItemTrie = open_items(path)
    path.unlink()
    program = (
        "import sys; from pathlib import Path; from vllm_trie.extras.items import open_items\n"
        "print(open_items(Path(sys.argv[1]), version=sys.argv[2]).num_items)"
    )
    command = [sys.executable, "-c", program, trie.memory, trie.version]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"2400\n"
    if can_seal:
        with pytest.raises(PermissionError):
            os.truncate(trie.memory, 0)
    memory, version = Path(trie.memory), trie.version
    del trie
    with pytest.raises(ItemsError):
        open_items(memory, version=version)
