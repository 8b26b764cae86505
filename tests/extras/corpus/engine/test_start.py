"""Corpora that are checked before anything starts."""

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.engine.families import with_own_tokenizer
from tests.engine.test_configuration import TREES, engine_config, refusal
from vllm_trie.drafts import parse_options
from vllm_trie.drafts.engine.start.verifier_setup import drafter_context
from vllm_trie.extras.corpus.corpus_file import write_corpus
from vllm_trie.lab.commands import corpus as corpus_cli

pytestmark = pytest.mark.usefixtures("inspect_models_here")


def test_files_are_checked_before_anything_starts(tmp_path):
    corpus = tmp_path / "corpus"
    texts = [np.arange(100, dtype=np.int32)]
    write_corpus(corpus, texts, vocab_size=2048, tokenizer="of another model")
    corpus.write_bytes(corpus.read_bytes()[:2000])
    named = {"ngram_trie": {"corpus": str(corpus)}}
    for options in (
        {**TREES, "corpus": str(corpus)},
        {"method": "trie_union", "drafters": ["ngram"], "options": named},
    ):
        assert f"corpus {corpus}: it is truncated" in refusal(speculative_config=options)
    write_corpus(corpus, texts, vocab_size=4096, tokenizer="of another model")
    said = refusal(speculative_config={**TREES, "corpus": str(corpus)})
    assert "its vocabulary has 4096 tokens, the model's has 2048" in said
    corpus.unlink()
    said = refusal(speculative_config={**TREES, "corpus": str(corpus)})
    assert f"option 'corpus' is an unusable file: corpus {corpus}: No such file" in said
    assert "`vllm-trie corpus build`" in said
    said = refusal(speculative_config={"method": "lookahead_trie", "corpus": str(corpus)})
    assert "options of method 'lookahead_trie': corpus is not an option" in said


def test_a_tokenizer_with_code_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model, corpus, text = with_own_tokenizer(tmp_path / "model"), tmp_path / "corpus", "a.txt"
    (tmp_path / text).write_text("one two three")
    words = ["build", str(tmp_path / text), "-o", str(corpus), "--tokenizer", model]
    refused = CliRunner().invoke(corpus_cli.app, words)
    assert "cannot be loaded" in refused.output
    assert "--trust-remote-code" in refused.output
    assert CliRunner().invoke(corpus_cli.app, [*words, "--trust-remote-code"]).exit_code == 0
    speculative = {**TREES, "corpus": str(corpus)}
    settings = {"model": model, "trust_remote_code": True, "speculative_config": speculative}
    context = drafter_context(engine_config(**settings), None)
    parse_options("ngram_trie", {"corpus": str(corpus)}).open_archive(context)
