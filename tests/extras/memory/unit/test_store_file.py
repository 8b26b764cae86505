"""Files of a warm start: written whole or not at all, read with suspicion."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import run_python
from vllm_trie.drafts.text_store import StoredText, salt_digest
from vllm_trie.extras.memory.folder import Identity, StoreFile, prompt_key, read_newest
from vllm_trie.extras.memory.store_file import (
    FORMAT,
    StoreError,
    StoreHeader,
    read_header,
    read_store,
    write_store,
)

MODEL = Identity("model", "fingerprint", 1000)
TENANT = salt_digest("tenant")


def make_header(identity: Identity = MODEL, saved_at: float = 1.0, **changes: Any) -> StoreHeader:
    return StoreHeader(**identity._asdict(), saved_at=saved_at, **changes)


def make_text(*token_ids: int, salt: bytes = b"") -> StoredText:
    return StoredText(salt, np.array(token_ids, dtype=np.int32))


def as_lists(texts: Any) -> list[tuple[bytes, list[int]]]:
    return [(text.salt, text.token_ids.tolist()) for text in texts]


TEXTS = [make_text(1, 2, 3), make_text(4, salt=TENANT), make_text(5, 6), make_text(7, 8)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.store"
    write_store(path, make_header(), TEXTS)
    return path


# -- one file --------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(file):
    header, texts = read_header(file), read_store(file)
    assert as_lists(texts) == as_lists(TEXTS)
    assert (header.num_texts, header.num_salts, header.num_tokens) == (4, 1, 8)
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert b"tenant" not in file.read_bytes()
    write_store(file, header, [])
    assert read_store(file) == []


def test_prompts_are_kept_with_their_answers(file):
    texts = [TEXTS[0]._replace(prompt=b"12345678"), TEXTS[1]]
    write_store(file, make_header(), texts)
    assert read_header(file).num_prompts == 2
    assert [text.prompt for text in read_store(file)] == [b"12345678", b""]
    write_store(file, make_header(), TEXTS)
    assert read_header(file).num_prompts == 0


def test_the_key_of_prompts_is_made_once_and_is_private(tmp_path):
    folder = tmp_path / "new"
    key = prompt_key(folder)
    assert len(set(key)) > 8
    assert prompt_key(folder) == key
    assert [oct(path.stat().st_mode & 0o777) for path in folder.iterdir()] == ["0o600"]
    (folder / "prompts.key").write_bytes(key[:5])
    with pytest.raises(OSError, match="5 bytes instead of 32; delete it"):
        prompt_key(folder)


def test_the_key_of_prompts_without_hard_links(tmp_path, monkeypatch):
    def fail(source: str, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", fail)
    key = prompt_key(tmp_path)
    assert len(set(key)) > 8
    assert prompt_key(tmp_path) == key
    assert [oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()] == ["0o600"]


def test_a_file_is_bounded(file, monkeypatch):
    monkeypatch.setattr("vllm_trie.extras.memory.store_file.MAX_TOKENS", 5)
    write_store(file, make_header(), TEXTS)
    assert as_lists(read_store(file)) == as_lists(TEXTS[1:])


def forge(file: Path, header: dict[str, Any], body: bytes) -> None:
    """Write a file with a right digest, whatever its header says."""
    complete = make_header().model_dump() | header

    class Loose:
        @staticmethod
        def model_dump_json() -> str:
            import json

            return json.dumps(complete)

    FORMAT.write(file, Loose, [body])


def ints(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


FORGED: dict[str, tuple[dict[str, Any], bytes]] = {
    "prompts for some texts": (
        {"num_texts": 2, "num_tokens": 2, "num_prompts": 1},
        ints(1, 1, -1, -1, 5, 5) + bytes(8),
    ),
    "lengths beyond the tokens": ({"num_texts": 1, "num_tokens": 1}, ints(9, -1, 5)),
    "negative length": ({"num_texts": 2, "num_tokens": 1}, ints(-1, 2, -1, -1, 5)),
    "overflowing lengths": ({"num_texts": 2, "num_tokens": 0}, ints(2**31 - 1, 2**31 - 1, -1, -1)),
    "salt that is not there": ({"num_texts": 1, "num_tokens": 1}, ints(1, 0, 5)),
    "negative token": ({"num_texts": 1, "num_tokens": 1}, ints(1, -1, -5)),
    "token beyond the vocabulary": ({"num_texts": 1, "num_tokens": 1}, ints(1, -1, 1000)),
    "numbers beyond the bounds": ({"num_tokens": 2**40}, b""),
    "negative numbers": ({"num_tokens": -1}, b""),
    "no time": ({"saved_at": float("nan")}, b""),
    "vocabulary of nothing": ({"vocab_size": 0}, b""),
    "text for numbers": ({"num_texts": "x"}, b""),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_files_are_refused(case, file):
    forge(file, *FORGED[case])
    with pytest.raises(StoreError, match=f"{file}.*delete it"):
        read_store(file)


def test_a_file_of_an_earlier_version_is_read(file):
    """Version 0.3 kept the numbers of drafter and node budget in the header."""
    numbers = {"drafter": "ngram_trie", "acceptance": {"verified": [1.0]}, "machine": "cpu"}
    forge(file, {"num_texts": 1, "num_tokens": 1, **numbers}, ints(1, -1, 5))
    assert as_lists(read_store(file)) == [(b"", [5])]


# -- a folder --------------------------------------------------------------------------------------


def test_files_of_others_and_no_files(tmp_path):
    warnings: list[str] = []
    assert read_newest(tmp_path / "none", MODEL, warnings.append) is None
    write_store(tmp_path / "other.store", make_header(Identity("other", "", 7)), [])
    assert read_newest(tmp_path, MODEL, warnings.append) is None
    assert warnings == []
    os.mkfifo(tmp_path / "pipe.store")
    (tmp_path / "folder.store").mkdir()
    (tmp_path / "dangling.store").symlink_to(tmp_path / "nowhere")
    assert read_newest(tmp_path, MODEL, warnings.append) is None
    assert len(warnings) == 3


def test_the_newest_file_that_can_be_used_is_read(tmp_path):
    warnings: list[str] = []
    for age in (1, 3, 2):
        write_store(tmp_path / f"{age}.store", make_header(saved_at=float(age)), [make_text(age)])
    store = read_newest(tmp_path, MODEL, pytest.fail)
    assert as_lists(store) == as_lists([make_text(3)])
    # One is truncated, which its header shows, and of one the content is damaged.
    for age, damaged in ((3, b""), (2, b"x")):
        path = tmp_path / f"{age}.store"
        path.write_bytes(path.read_bytes()[:-1] + damaged)
    store = read_newest(tmp_path, MODEL, warnings.append)
    assert as_lists(store) == as_lists([make_text(1)])
    assert ["truncated" in warning for warning in warnings] == [True, False]
    assert "damaged" in warnings[1]


def test_engines_write_files_of_their_own(tmp_path):
    folder = tmp_path / "new"
    first, second = StoreFile.claim(folder, MODEL), StoreFile.claim(folder, MODEL)
    other = StoreFile.claim(folder, Identity("other", "", 7))
    assert len({first.path, second.path, other.path}) == 3
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    leftover, old = folder / f".{first.path.name}-killed", folder / f".{other.path.name}-killed"
    recent = folder / f".{second.path.name}-writes"
    for path in (leftover, recent, old):
        path.touch()
    a_day_ago = time.time() - 25 * 3600
    os.utime(old, (a_day_ago, a_day_ago))
    first.release()
    again = StoreFile.claim(folder, MODEL)
    assert again.path == first.path
    assert [*folder.glob(".*")] == [recent]


def test_lock_files_that_are_none(tmp_path):
    """Links are not followed, pipes do not block, folders do not end the search."""
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / f"{MODEL.key}-0.lock").symlink_to(target)
    (tmp_path / f"{MODEL.key}-1.lock").mkdir()
    os.mkfifo(tmp_path / f"{MODEL.key}-2.lock")
    claimed = StoreFile.claim(tmp_path, MODEL)
    assert claimed.path.name == f"{MODEL.key}-2.store"
    other = StoreFile.claim(tmp_path, MODEL)
    assert other.path.with_suffix(".lock").stat().st_mode & 0o777 == 0o600
    assert target.read_text() == "kept"


WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from vllm_trie.drafts.text_store import StoredText
from vllm_trie.extras.memory.store_file import StoreHeader, read_store, write_store
path, kills = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(1)
texts = [StoredText(b"", np.full(200, i, dtype=np.int32)) for i in range(300)]
header = StoreHeader(model="model", tokenizer="", vocab_size=1000, saved_at=0.0)
start = time.perf_counter()
write_store(path, header, texts)
seconds = time.perf_counter() - start
for kill in range(kills):
    child = os.fork()
    while child == 0:
        write_store(path, header, texts)
    time.sleep(rng.uniform(0, 3 * seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(read_store(path)) == 300, kill
print(len(list(path.parent.glob(".*"))), "left over")
"""


def test_a_killed_writer_leaves_the_file_whole(tmp_path):
    claimed = StoreFile.claim(tmp_path, MODEL)
    printed = run_python("-c", WRITER, str(claimed.path), "60", timeout=300).stdout
    assert not printed.startswith("0 "), "no kill hit a write"
    assert len(read_store(claimed.path)) == 300
    claimed.release()
    assert StoreFile.claim(tmp_path, MODEL).path == claimed.path
    assert list(tmp_path.glob(".*")) == []
