"""The corpus file: round trip, and every way in which a file can be wrong."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.unit.drafters.support import end, make_context, make_request
from vllm_trie.drafts import parse_options
from vllm_trie.drafts.ngram_trie import NgramTrieDrafter
from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngrams import Job, NativeBackend
from vllm_trie.extras.corpus import options as options_module
from vllm_trie.extras.corpus.corpus_file import CorpusError, open_corpus, write_corpus
from vllm_trie.files import watched_file
from vllm_trie.files.checked_file import PREFIX
from vllm_trie.files.tokenizers import TextTokenizer, fingerprint
from vllm_trie.lab.commands import corpus as corpus_cli

VOCABULARY = {chr(ord("a") + token): token for token in range(26)}
DOCUMENTS = [np.arange(20, dtype=np.int32), np.array([3, 4, 5, 9, 3, 4, 5, 9], dtype=np.int32)]


def encode(text: str) -> list[int]:
    return [VOCABULARY[char] for char in text if char in VOCABULARY]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "corpus"
    write_corpus(path, DOCUMENTS, len(VOCABULARY), fingerprint(VOCABULARY))
    return path


@pytest.fixture
def letters(monkeypatch):
    """The tokenizer "letters", whose tokens are those of VOCABULARY."""

    def load(
        name: str, revision: str | None = None, trust_remote_code: bool = False
    ) -> TextTokenizer:
        if (name, revision) != ("letters", None):
            return TextTokenizer(encode, {**VOCABULARY, "A": 26})
        return TextTokenizer(encode, VOCABULARY)

    monkeypatch.setattr(options_module, "load_tokenizer", load)
    monkeypatch.setattr(corpus_cli, "load_tokenizer", load)


@pytest.mark.usefixtures("letters")
def test_a_corpus_is_replaced_while_it_is_used(path, tmp_path, monkeypatch):
    monkeypatch.setattr(watched_file, "INTERVAL", 0.0)
    options = parse_options("ngram_trie", {"corpus": str(path)})
    drafter, on_two_ranks = (
        NgramTrieDrafter(options, make_context(tokenizer="letters", tensor_parallel_size=size))
        for size in (1, 2)
    )

    def draft(drafter: NgramTrieDrafter = drafter) -> list[int]:
        for _ in range(2):
            [tree] = drafter.propose([make_request([30, 3, 4])])
            end(drafter, "a")
            file = getattr(drafter._newest_archive, "__self__", None)
            if file is not None and file._thread is not None:
                file._thread.join()
        return tree.token_ids[:1].tolist()

    assert draft() == draft(on_two_ranks) == [5]
    write_corpus(tmp_path / "new", [np.array([3, 4, 9, 3, 4, 9])], 26, fingerprint(VOCABULARY))
    (tmp_path / "new").replace(path)
    assert draft() == [9]
    assert draft(on_two_ranks) == [5], "they would see it at different steps"
    os.truncate(path, 0)
    assert draft() == [9]


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    "other", [{"tokenizer": "others"}, {"tokenizer": "letters", "tokenizer_revision": "older"}]
)
def test_the_drafter_reads_it(path, other):
    context = make_context(tokenizer="letters")
    drafter = NgramTrieDrafter(parse_options("ngram_trie", {"corpus": str(path)}), context)
    [tree] = drafter.propose([make_request([30, 3, 4])])
    assert tree.token_ids.tolist()[:1] == [5]
    with pytest.raises(CorpusError, match="another tokenizer than the model's"):
        NgramTrieDrafter(parse_options("ngram_trie", {"corpus": str(path)}), make_context(**other))


def test_tokenizer_and_vocabulary_must_fit(path):
    with pytest.raises(CorpusError, match="another tokenizer"):
        open_corpus(path, tokenizer=fingerprint({"a": 0}))
    written_before = hashlib.sha256(b"0:1:b\n1:1:a\n").hexdigest()
    assert fingerprint({"a": 1, "b": 0}) == written_before, "earlier files fit no more"
    with pytest.raises(CorpusError, match="its vocabulary has 26 tokens, the model's has 25"):
        open_corpus(path, vocab_size=25)
    open_corpus(path, vocab_size=26)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_forged_file_with_a_right_digest_cannot_crash(path, data):
    """Numbers of the index are changed and the digest is made to match: refused, or harmless."""
    content = bytearray(path.read_bytes())
    _, _, size, _ = PREFIX.unpack(content[: PREFIX.size])
    begin = -(-(PREFIX.size + size) // 64) * 64
    for _ in range(data.draw(st.integers(1, 5))):
        place = begin + 4 * data.draw(st.integers(0, (len(content) - begin) // 4 - 1))
        value = data.draw(
            st.one_of(st.integers(-3, 60), st.sampled_from([2**31 - 1, -(2**31), 10**6]))
        )
        content[place : place + 4] = value.to_bytes(4, "little", signed=True)
    digest = hashlib.sha256(content[PREFIX.size :]).digest()
    content[16:48] = digest
    forged = path.with_suffix(".forged")
    forged.write_bytes(content)
    try:
        corpus = open_corpus(forged)
    except CorpusError:
        return
    backend = NativeBackend(BLEND)
    for text in ([3, 4], [9], list(range(18)), [0, 1, 2]):
        tokens = np.array(text, dtype=np.int32)
        job = Job(backend.new_index(8), None, corpus, tokens, len(text), 40, 30, False)
        [draft] = backend.draft_batch([job])
        assert draft.tree.num_nodes <= 40
        assert all(0 <= token < len(VOCABULARY) for token in draft.tree.token_ids)


def test_writing_checks_its_input(tmp_path):
    path = tmp_path / "corpus"
    with pytest.raises(CorpusError, match=r"document 1 has token 26.*\[0, 26\)"):
        write_corpus(path, [DOCUMENTS[0], np.array([26])], 26, "x")
    with pytest.raises(CorpusError, match="no text"):
        write_corpus(path, [np.array([], dtype=np.int32)], 26, "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("letters")
def test_the_commands(tmp_path):
    (tmp_path / "one.txt").write_text("abcdef")
    (tmp_path / "many.jsonl").write_text('{"text": "xyz"}\n\n{"token_ids": [1, 2, 3]}\n')
    np.save(tmp_path / "ids.npy", np.arange(5))
    sources = [str(tmp_path / name) for name in ("one.txt", "many.jsonl", "ids.npy")]
    output = str(tmp_path / "out")
    runner = CliRunner()
    result = runner.invoke(
        corpus_cli.app, ["build", *sources, "-o", output, "--tokenizer", "letters"]
    )
    assert result.exit_code == 0, result.output
    assert "4 documents, 17 tokens" in result.output
    assert "4 documents, 17 tokens" in runner.invoke(corpus_cli.app, ["info", output]).output
    Path(output).write_bytes(Path(output).read_bytes()[:-1])
    result = runner.invoke(corpus_cli.app, ["info", output])
    assert result.exit_code == 1
    assert "truncated" in result.output


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{oops", "line 1 is not JSON"),
        ("a.jsonl", json.dumps({"body": "x"}).encode(), "line 1 has neither 'text'"),
        ("a.jsonl", json.dumps({"token_ids": [1, -2]}).encode(), "token ids outside of"),
        ("a.jsonl", json.dumps({"token_ids": [99]}).encode(), "has token 99"),
        ("a.jsonl", json.dumps({"token_ids": [10**30]}).encode(), "1 has token ids outside of"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}', "a.jsonl, line 2 has a lone surrogate"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl, line 2 is not JSON: 'utf-8'"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_wrong_sources_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    arguments = ["build", str(tmp_path / name), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(corpus_cli.app, [*arguments, "--tokenizer", "letters"])
    assert result.exit_code == 1
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cannot_be_loaded_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.model").write_bytes(b"not SentencePiece")
    arguments = ["build", str(tmp_path / "a.txt"), "-o", str(tmp_path / "out")]
    tokenizer = str(tmp_path / "bad.model")
    result = CliRunner().invoke(corpus_cli.app, [*arguments, "--tokenizer", tokenizer])
    assert result.exit_code == 1
    assert "cannot be loaded" in result.output
