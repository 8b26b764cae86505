"""Saving what an engine learned and taking it up again, without an engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.drafters.support import VOCAB, end, make_context, make_drafter, make_request
from vllm_trie.drafts import Drafter
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.extras.memory import warm_start as module
from vllm_trie.extras.memory.options import MemoryOptions
from vllm_trie.extras.memory.store_file import Identity, StoreHeader, read_store, write_store
from vllm_trie.extras.memory.warm_start import WarmStart
from vllm_trie.hooks.wire import TreeStats
from vllm_trie.tree import TokenTree

IDENTITY = Identity("model", "fingerprint", VOCAB)
QUESTION, ANSWER = [1, 2, 3], [10, 11, 12, 13, 14]
SECRET = [500, 501, 502, 503, 504, 505, 506, 507]


def start(folder: Path, method: str = "ngram_trie", **options: Any) -> tuple[WarmStart, Drafter]:
    saving = WarmStart(folder, IDENTITY)
    return saving, make_drafter(method, [saving], **options)


def end_step(saving: WarmStart) -> None:
    saving.ended(TreeStep(), [[1]], TreeStats())


def finish_job(saving: WarmStart) -> None:
    saving._job.join()


def answer(drafter: Drafter, tokens: Sequence[int], salt: str | None = None) -> None:
    for number in range(2):
        request = make_request(
            [*QUESTION, *tokens], f"{number}", num_prompt_tokens=3, cache_salt=salt
        )
        end(drafter, request)


def draft(drafter: Drafter, tokens: Sequence[int], salt: str | None = None) -> TokenTree:
    request = make_request(tokens, "new", num_prompt_tokens=len(tokens), cache_salt=salt)
    [tree] = drafter.propose([request])
    end(drafter, request)
    return tree


def drafted(drafter: Drafter, tokens: Sequence[int], salt: str | None = None) -> list[int]:
    """The likeliest path."""
    return draft(drafter, tokens, salt).chain().token_ids.tolist()


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def run_once(folder: Path) -> None:
    """An engine that answers and ends."""
    saving, drafter = start(folder)
    answer(drafter, ANSWER)
    end_step(saving)
    saving.closed()


def test_a_restart_knows_the_answer_to_a_prompt_from_its_first_token_on(tmp_path):
    prompt, outputs = (
        list(range(100, 140)),
        [[10, *range(20, 40)], *([10, 50, i] for i in range(5))],
    )
    saving, drafter = start(tmp_path)
    for i, output in enumerate(outputs):
        before = prompt if i == 0 else [i]
        request = make_request([*before, *output], str(i), num_prompt_tokens=len(before))
        end(drafter, request)
    end_step(saving)
    saving.closed()

    def first_draft(drafter: Drafter) -> list[int]:
        request = make_request([*prompt, 10], "again", num_prompt_tokens=len(prompt))
        return drafter.propose([request])[0].chain().token_ids[:9].tolist()

    expected = list(range(20, 29))
    _, restarted = start(tmp_path)
    assert first_draft(restarted) == expected
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert not any(np.array(prompt[i : i + 2], "<i4").tobytes() in content for i in range(39))


def test_a_tenants_text_is_drafted_for_nobody_else(tmp_path):
    """By attack: other salts, none, the digest, a salt like an adapter's, all prefixes of it."""
    saving, drafter = start(tmp_path)
    answer(drafter, SECRET, salt="tenant")
    end_step(saving)
    saving.closed()
    [path] = tmp_path.glob("*.store")
    [stored] = {text.salt for text in read_store(path)}
    guesses = [
        None,
        "",
        "\ud800",
        "tenan",
        "tenant ",
        "Tenant",
        "tenant\0",
        "\0tenant",
        "adapter\0tenant",
    ]
    guesses += [stored.hex(), stored.decode("latin-1"), "vllm-trie cache salt\0tenant"]
    _, drafter = start(tmp_path)
    for guess in guesses:
        for length in range(1, len(SECRET)):
            draft_tokens = draft(drafter, [5, *SECRET[:length]], guess).token_ids.tolist()
            assert not set(draft_tokens) & set(SECRET[length:]), guess
    assert drafted(drafter, [5, *SECRET[:2]], "tenant")[:2] == SECRET[2:4]


def test_saves_at_intervals_in_a_thread_and_at_the_end(tmp_path, monkeypatch):
    threads: list[str] = []
    write = write_store

    def recorded(*content: Any) -> None:
        threads.append(threading.current_thread().name)
        write(*content)

    monkeypatch.setattr(module, "write_store", recorded)
    saving, drafter = start(tmp_path)
    end_step(saving)
    assert threads == []  # not before the interval has passed
    monkeypatch.setattr(saving, "_next_save", 0.0)
    answer(drafter, ANSWER)
    for _ in range(2):  # the second time, long before the next one is due
        end_step(saving)
        finish_job(saving)
    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name
    [path] = tmp_path.glob("*.store")
    assert len(read_store(path)) == 2
    saving.closed()
    saving.closed()
    assert len(threads) == 2
    idle, _ = start(tmp_path)
    monkeypatch.setattr(idle, "_next_save", 0.0)
    end_step(idle)  # of a request that keeps nothing, as those of checks
    idle.closed()
    assert len(threads) == 2


def test_a_last_save_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch):
    begun, go_on, write = threading.Event(), threading.Event(), write_store

    def slow(*content: Any) -> None:
        begun.set()
        assert go_on.wait(30.0)
        write(*content)

    monkeypatch.setattr(module, "write_store", slow)
    monkeypatch.setattr(module, "_LAST_SAVE", 0.01)
    saving, drafter = start(tmp_path)
    answer(drafter, ANSWER)
    monkeypatch.setattr(saving, "_next_save", 0.0)
    end_step(saving)
    assert begun.wait(30.0)
    job = saving._job
    monkeypatch.setattr(saving, "_next_save", 0.0)
    end_step(saving)
    assert saving._job is job, "a thread for each interval"
    saving.closed()
    assert [*tmp_path.glob("*.store")] == []
    go_on.set()
    finish_job(saving)
    [path] = tmp_path.glob("*.store")
    assert len(read_store(path)) == 2


def test_engines_of_one_model_share_a_file_and_the_last_save_stays(tmp_path):
    folder = tmp_path / "new"
    first, of_first = start(folder)
    second, of_second = start(folder)
    other = WarmStart(folder, Identity("other", "fingerprint", VOCAB))
    other.forget()
    finish_job(other)
    for saving, drafter, last in ((first, of_first, 15), (second, of_second, 16)):
        answer(drafter, [*ANSWER, last])
        saving.closed()
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert len([*folder.iterdir()]) == 2
    _, restarted = start(folder)
    assert drafted(restarted, [5, *ANSWER])[0] == 16


def test_the_first_rank_alone_saves_and_revisions_have_files_of_their_own(tmp_path, monkeypatch):
    options = MemoryOptions(store_path=str(tmp_path))
    monkeypatch.setattr(module.config, "read", lambda _: SimpleNamespace(engine_options=options))

    def files(revision: str | None, rank: int = 0) -> list[Path]:
        context = make_context(model=str(tmp_path / "model"), rank=rank, revision=revision)
        vllm_config: Any = None
        return [store._path for store in module.open_stores(vllm_config, context)]

    assert files(None, rank=1) == []
    assert len({*files(None), *files("main"), *files(None)}) == 2


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_damaged(path: Path) -> None:
    header = StoreHeader(**IDENTITY._asdict(), saved_at=0.0)
    write_store(path, header, [])
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def make_other(path: Path) -> None:
    write_store(path, StoreHeader(model="other", tokenizer="", vocab_size=9, saved_at=0.0), [])


@pytest.mark.parametrize("make", [make_pipe, make_damaged, make_other, Path.mkdir])
def test_a_file_that_cannot_be_used_costs_a_cold_start(tmp_path, make, plugin_log):
    path = tmp_path / f"{IDENTITY.key}-0.store"
    make(path)
    saving, drafter = start(tmp_path)
    [warning] = plugin_log.records
    assert warning.levelname == "WARNING"
    assert f"store {path}: " in warning.getMessage()
    assert "; the start is cold" in warning.getMessage()
    answer(drafter, ANSWER)
    saving.closed()
    if make is not Path.mkdir:
        assert len(read_store(path)) == 2


def test_a_start_removes_what_killed_engines_left(tmp_path):
    old, recent = tmp_path / ".any.store-killed", tmp_path / ".any.store-writes"
    for path in (old, recent):
        path.touch()
    a_day_ago = time.time() - 25 * 3600
    os.utime(old, (a_day_ago, a_day_ago))
    start(tmp_path)
    assert [*tmp_path.iterdir()] == [recent]


@pytest.mark.parametrize("writes", [False, True], ids=["idle", "while a save writes"])
def test_what_was_reset_is_gone_from_the_file_at_once(tmp_path, monkeypatch, writes):
    """Without a step or a shutdown; a save that has begun before comes first."""
    run_once(tmp_path)
    saving, drafter = start(tmp_path)
    may_write = threading.Event()

    def slow(*content: Any) -> None:
        assert may_write.wait(30.0)
        write_store(*content)

    monkeypatch.setattr(module, "write_store", slow)
    if writes:
        answer(drafter, ANSWER)
        monkeypatch.setattr(saving, "_next_save", 0.0)
        end_step(saving)
    drafter.reset()
    may_write.set()
    finish_job(saving)
    [path] = tmp_path.glob("*.store")
    assert read_store(path) == []


def test_a_reset_that_is_not_saved_at_once_is_saved_at_the_end(tmp_path, monkeypatch):
    run_once(tmp_path)
    saving, drafter = start(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", no_thread)
        drafter.reset()
    saving.closed()
    [path] = tmp_path.glob("*.store")
    assert read_store(path) == []


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, plugin_log, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    saving, _ = start(blocked / "below")
    end_step(saving)
    saving.closed()
    assert "cannot be saved: [Errno 20] Not a directory" in plugin_log.text

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", no_thread)
        saving, drafter = start(tmp_path)
        answer(drafter, ANSWER)
        patched.setattr(saving, "_next_save", 0.0)
        end_step(saving)
    assert "cannot be saved: can't start new thread; the engine goes on" in plugin_log.text
    saving.closed()

    monkeypatch.setattr(module, "write_store", full)
    saving, drafter = start(tmp_path)
    answer(drafter, ANSWER)
    plugin_log.clear()
    for _ in range(2):
        end_step(saving)
        saving.closed()
    assert plugin_log.text.count("No space left on device") >= 1
    assert "the engine goes on" in plugin_log.text
    saving, drafter = start(tmp_path)
    answer(drafter, ANSWER)
    plugin_log.clear()
    for fault in (full, full, write_store, full):
        monkeypatch.setattr(module, "write_store", fault)
        monkeypatch.setattr(saving, "_next_save", 0.0)
        end_step(saving)
        finish_job(saving)
    levels = [record.levelname for record in plugin_log.records]
    assert levels.count("WARNING") == 2, "it warns again of what fails after it went well"


def test_the_texts_of_a_union_are_those_of_its_parts(tmp_path):
    run_once(tmp_path)
    saving, union = start(tmp_path, "trie_union", drafters=["ngram_trie"])
    assert drafted(union, [5, 10, 11])[:3] == [12, 13, 14]
    assert len(saving._texts()) == 2
