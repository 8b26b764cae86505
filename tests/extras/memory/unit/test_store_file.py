"""Files of a warm start: written whole or not at all, read with suspicion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_trie.drafts.text_store import StoredText, salt_digest
from vllm_trie.extras.memory.store_file import (
    FORMAT,
    Identity,
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
    "negative salt": ({"num_texts": 1, "num_tokens": 1}, ints(1, -2, 5)),
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


def test_a_file_of_another_model_is_refused(file):
    read_store(file, MODEL)
    for name in ("model", "tokenizer"):
        with pytest.raises(StoreError, match="that of another model or tokenizer"):
            read_store(file, MODEL._replace(**{name: "other"}))
