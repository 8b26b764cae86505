"""Corpora that are checked before anything starts."""

import numpy as np
import pytest

from tests.engine.test_configuration import TREES, refusal
from vllm_trie.extras.corpus.corpus_file import write_corpus

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
