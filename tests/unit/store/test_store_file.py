"""Files of a warm start: written whole or not at all, read with suspicion, shared by engines."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.processes import run_python
from vllm_trie import cli
from vllm_trie.checked_file import PREFIX
from vllm_trie.store import (
    Identity,
    SharedFolder,
    Slot,
    StoredText,
    StoreError,
    StoreHeader,
    merge_texts,
    prompt_key,
    read_header,
    read_store,
    salt_digest,
    write_store,
)
from vllm_trie.store import folder as folder_module
from vllm_trie.store.store_file import FORMAT

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
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.store"
    write_store(path, make_header(), TEXTS)
    return path


# -- one file --------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(file: Path) -> None:
    header, texts = read_store(file)
    assert as_lists(texts) == as_lists(TEXTS)
    assert (header.num_texts, header.num_salts, header.num_tokens) == (4, 1, 8)
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert b"tenant" not in file.read_bytes()
    write_store(file, header, [])
    assert read_store(file).texts == []


def test_prompts_are_kept_with_their_answers(file: Path) -> None:
    texts = [TEXTS[0]._replace(prompt=b"12345678"), TEXTS[1]]
    header = write_store(file, make_header(), texts)
    assert header.num_prompts == 2
    assert [text.prompt for text in read_store(file).texts] == [b"12345678", b""]
    assert write_store(file, make_header(), TEXTS).num_prompts == 0


def test_the_key_of_prompts_is_made_once_and_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    key = prompt_key(folder)
    assert len(set(key)) > 8
    assert prompt_key(folder) == key
    assert [oct(path.stat().st_mode & 0o777) for path in folder.iterdir()] == ["0o600"]
    (folder / "prompts.key").write_bytes(key[:5])
    with pytest.raises(OSError, match="5 bytes instead of 32; delete it"):
        prompt_key(folder)


def test_a_file_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_trie.store.store_file.MAX_TOKENS", 5)
    write_store(file, make_header(), TEXTS)
    assert as_lists(read_store(file).texts) == as_lists(TEXTS[1:])


def forge(file: Path, header: dict[str, Any], body: bytes) -> None:
    """Write a file with a right digest, whatever its header says."""
    complete = make_header().model_dump() | header

    class Loose:
        @staticmethod
        def model_dump_json() -> str:
            import json

            return json.dumps(complete)

    FORMAT.write(file, Loose, [body])  # type: ignore[arg-type]


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
def test_forged_files_are_refused(case: str, file: Path) -> None:
    forge(file, *FORGED[case])
    with pytest.raises(StoreError, match=f"{file}.*delete it"):
        read_store(file)


def test_a_file_of_an_earlier_version_is_read(file: Path) -> None:
    """Version 0.3 kept the numbers of drafter and node budget in the header."""
    numbers = {"drafter": "ngram_trie", "acceptance": {"verified": [1.0]}, "machine": "cpu"}
    forge(file, {"num_texts": 1, "num_tokens": 1, **numbers}, ints(1, -1, 5))
    assert as_lists(read_store(file).texts) == [(b"", [5])]


def mutations(content: bytes, count: int) -> Iterator[bytes]:
    """Yield damaged copies: cut, extended, flipped, overwritten, with another prefix."""
    rng = random.Random(0)
    for number in range(count):
        changed = bytearray(content)
        place = rng.randrange(len(content))
        kind = number % 5
        if kind == 0:
            del changed[place:]
        elif kind == 1:
            changed += rng.randbytes(place + 1)
        elif kind == 2:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 3:
            end = min(place + 40, len(content))
            changed[place:end] = rng.randbytes(end - place)
            if changed == content:
                changed[place] ^= 1
        else:
            struct.pack_into("<II", changed, 8, rng.getrandbits(32), rng.getrandbits(32))
        yield bytes(changed)


def test_damaged_files_are_a_warning(file: Path) -> None:
    content = file.read_bytes()
    for damaged in mutations(content, 100):
        file.write_bytes(damaged)
        warnings: list[str] = []
        assert SharedFolder(file.parent, MODEL, warnings.append).read() == []
        if warnings == []:  # the damage made it another model's
            assert Identity.of(read_header(file)) != MODEL
        else:
            assert len(warnings) == 1, warnings
            assert str(file) in warnings[0]


def test_a_large_header_is_not_read(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(PREFIX.pack(FORMAT.magic, FORMAT.version, 1 << 31, bytes(32)))
        opened.truncate(1 << 33)  # sparse
    with pytest.raises(StoreError, match="header"):
        read_store(file)


# -- a folder --------------------------------------------------------------------------------------


def test_files_of_others_and_no_files(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert SharedFolder(tmp_path / "none", MODEL, warnings.append).read() == []
    write_store(tmp_path / "other.store", make_header(Identity("other", "", 7)), [])
    shared = SharedFolder(tmp_path, MODEL, warnings.append)
    assert shared.read() == []
    assert warnings == []
    os.mkfifo(tmp_path / "pipe.store")
    (tmp_path / "folder.store").mkdir()
    (tmp_path / "dangling.store").symlink_to(tmp_path / "nowhere")
    assert shared.read() == []
    assert shared.read() == []
    assert len(warnings) == 3


def test_all_files_are_merged_the_newest_first(tmp_path: Path) -> None:
    old, new = tmp_path / "old.store", tmp_path / "new.store"
    write_store(old, make_header(saved_at=1.0), [make_text(1), make_text(2)])
    write_store(new, make_header(saved_at=2.0), [make_text(3), make_text(2)])
    stores = SharedFolder(tmp_path, MODEL, pytest.fail).read()
    assert [store.header.saved_at for store in stores] == [2.0, 1.0]
    merged = merge_texts([store.texts for store in stores], 100)
    assert as_lists(merged) == as_lists([make_text(1), make_text(3), make_text(2)])
    same_tokens = [[make_text(1)], [make_text(1, salt=TENANT)]]
    assert len(merge_texts(same_tokens, 100)) == 2
    repeated = [[make_text(1), make_text(1)], [make_text(1), make_text(2)]]
    assert as_lists(merge_texts(repeated, 100)) == as_lists(
        [make_text(1), make_text(2), make_text(1)]
    )
    assert as_lists(merge_texts([store.texts for store in stores], 2)) == as_lists(merged[1:])


def test_a_later_reading_finds_what_others_have_saved_since(tmp_path: Path) -> None:
    ours, first, second = (tmp_path / f"{name}.store" for name in ("own", "first", "second"))
    shared = SharedFolder(tmp_path, MODEL, pytest.fail)
    assert shared.read() == []
    write_store(ours, make_header(), [make_text(1)])
    write_store(first, make_header(), [make_text(2), make_text(3), make_text(3)])
    assert [len(store.texts) for store in shared.read()] == [1, 3]
    assert shared.read() == []
    # The others have read one another's texts, and the own ones.
    write_store(ours, make_header(saved_at=2.0), [make_text(1), make_text(4)])
    write_store(first, make_header(saved_at=2.0), [make_text(4), make_text(1), make_text(5)])
    write_store(second, make_header(saved_at=3.0), [make_text(3), make_text(6), make_text(5)])
    new = [as_lists(store.texts) for store in shared.read(ours)]
    assert new == [as_lists([make_text(6), make_text(5)]), as_lists([make_text(5)])]
    assert shared.read(ours) == []
    first.unlink()
    write_store(second, make_header(saved_at=4.0), [make_text(5, salt=TENANT), make_text(6)])
    assert [as_lists(s.texts) for s in shared.read(ours)] == [as_lists([make_text(5, salt=TENANT)])]


def test_engines_write_files_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    first, second = Slot.claim(folder, MODEL), Slot.claim(folder, MODEL)
    other = Slot.claim(folder, Identity("other", "", 7))
    assert len({first.path, second.path, other.path}) == 3
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    leftover = folder / f".{first.path.name}-killed"
    leftover.touch()
    first.release()
    again = Slot.claim(folder, MODEL)
    assert again.path == first.path
    assert not leftover.exists()


def test_lock_files_that_are_none(tmp_path: Path) -> None:
    """Links are not followed, pipes do not block, folders do not end the search."""
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / f"{MODEL.key}-0.lock").symlink_to(target)
    (tmp_path / f"{MODEL.key}-1.lock").mkdir()
    os.mkfifo(tmp_path / f"{MODEL.key}-2.lock")
    slot = Slot.claim(tmp_path, MODEL)
    assert slot.path.name == f"{MODEL.key}-2.store"
    other = Slot.claim(tmp_path, MODEL)
    assert other.path.with_suffix(".lock").stat().st_mode & 0o777 == 0o600
    assert target.read_text() == "kept"


def test_a_file_that_cannot_be_read_for_a_while_is_no_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.store", tmp_path / "second.store"
    shared = SharedFolder(tmp_path, MODEL, lambda message: None)
    write_store(first, make_header(saved_at=1.0), [make_text(1)])
    write_store(second, make_header(saved_at=2.0), [make_text(2)])
    assert len(shared.read()) == 2
    write_store(first, make_header(saved_at=3.0), [make_text(1), make_text(3)])
    write_store(second, make_header(saved_at=4.0), [make_text(2), make_text(4)])
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "read_store", failing_read(second))
        assert [as_lists(s.texts) for s in shared.read()] == [as_lists([make_text(3)])]
        patch.setattr(folder_module, "MAX_TOKENS", -1)  # as if the others had brought enough
        assert shared.read() == []
    assert [as_lists(s.texts) for s in shared.read()] == [as_lists([make_text(4)])]


def failing_read(path: Path) -> Any:
    def read(other: Path) -> Any:
        if other == path:
            raise StoreError("the disk is busy")
        return read_store(other)

    return read


WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from vllm_trie.store import StoredText, StoreHeader, read_store, write_store
path, kills = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(1)
texts = [StoredText(b"", np.full(200, i, dtype=np.int32)) for i in range(300)]
for kill in range(kills):
    child = os.fork()
    while child == 0:
        header = StoreHeader(model="model", tokenizer="", vocab_size=1000, saved_at=float(kill))
        write_store(path, header, texts)
    time.sleep(rng.uniform(0, 0.006))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if path.exists():
        assert len(read_store(path).texts) == 300, kill
print(len(list(path.parent.glob(".*"))), "left over")
"""


def test_a_killed_writer_leaves_the_file_whole(tmp_path: Path) -> None:
    slot = Slot.claim(tmp_path, MODEL)
    printed = run_python("-c", WRITER, str(slot.path), "60", timeout=300).stdout
    assert not printed.startswith("0 "), "no kill hit a write"
    assert len(read_store(slot.path).texts) == 300
    slot.release()
    assert Slot.claim(tmp_path, MODEL).path == slot.path
    assert list(tmp_path.glob(".*")) == []


# -- the commands ----------------------------------------------------------------------------------


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["store", *map(str, arguments)])


def test_info(file: Path) -> None:
    result = run("info", file)
    assert result.exit_code == 0
    assert "4 texts, 8 tokens, model 'model'" in result.stdout
    assert "1 texts of 1 cache salts or adapters" in result.stdout
    file.write_bytes(file.read_bytes()[:-1])
    result = run("info", file)
    assert result.exit_code == 1
    assert "truncated" in result.stderr


def test_merge(file: Path) -> None:
    other, output = file.with_name("b.store"), file.with_name("c.store")
    write_store(other, make_header(saved_at=2.0), [make_text(9)])
    assert run("merge", file, other, "-o", output, "--max-tokens", 4).exit_code == 0
    header, texts = read_store(output)
    assert header.saved_at == 2.0
    assert as_lists(texts) == as_lists([make_text(7, 8), make_text(9)])
    write_store(other, make_header(Identity("other", "", 1000)), [])
    result = run("merge", file, other, "-o", output)
    assert result.exit_code == 1
    assert "merge those of one model" in result.stderr


def test_export_makes_a_corpus_without_texts_of_tenants(file: Path) -> None:
    from vllm_trie.lab.tiny_model import model_path

    output, corpus = file.with_name("texts.jsonl"), file.with_name("corpus")
    result = run("export", file, "-o", output)
    assert "3 texts; 1 with a cache salt or adapter left out" in result.stdout
    assert '{"token_ids": [4]}' not in output.read_text()
    assert oct(output.stat().st_mode & 0o777) == "0o600"
    arguments = ["corpus", "build", output, "-o", corpus, "--tokenizer", model_path()]
    built = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert "3 documents, 7 tokens" in built.stdout, built.output
