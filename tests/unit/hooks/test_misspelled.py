"""Names that are nearly a method's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_trie.drafters import available_methods
from vllm_trie.vllm_hooks.setup import arguments as misspelled
from vllm_trie.vllm_hooks.setup.arguments import meant, refuse_misspelled_method

THEIRS = ("ngram", "medusa", "suffix", "eagle", "eagle3", "draft_model", "custom_class")


@pytest.fixture(autouse=True)
def _methods_of_vllm(monkeypatch):
    monkeypatch.setattr(misspelled, "vllm_methods", lambda: THEIRS)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ngram_tri", "ngram_trie"),
        ("ngram-trie", "ngram_trie"),
        ("NGram_Trie", "ngram_trie"),
        ("ngramtree", "ngram_trie"),
        ("medusa-dynamic", "medusa_dynamic"),
        ("lookahead", "lookahead_trie"),
        ("union", "trie_union"),
    ],
)
def test_what_was_meant(name, method):
    assert meant(name, THEIRS) == method


@pytest.mark.parametrize(
    "name", [*THEIRS, *available_methods(), "ngrm", "eagle4", "medusa2", "no_such", "", None, 7]
)
def test_what_is_vllms_to_answer(name):
    assert meant(name, THEIRS) == ""


def arguments(speculative: Any = None, **flags: Any) -> SimpleNamespace:
    values = {"spec_method": None, "spec_model": None, **flags}
    return SimpleNamespace(speculative_config=speculative, **values)


@pytest.mark.parametrize(
    "engine_args",
    [
        arguments({"method": "ngram_tri"}),
        arguments({"model": "ngram_tri"}),
        arguments(spec_method="ngram_tri"),
        arguments(spec_model="ngram_tri"),
        arguments({"num_speculative_tokens": 4}, spec_method="ngram_tri"),
    ],
)
def test_refusals(engine_args):
    with pytest.raises(ValueError, match="'ngram_tri' is unknown; did you mean") as caught:
        refuse_misspelled_method(engine_args)
    for method in available_methods():
        assert method in str(caught.value)


@pytest.mark.parametrize(
    "engine_args",
    [
        arguments(),
        arguments({"method": "ngram"}),
        arguments({"method": "eagel"}),
        arguments({"method": "draft_model", "model": "ngram_tri"}),
        arguments({"model": "someone/ngram-trie-7b"}),
        arguments({"model": "gpt2"}),
        arguments("ngram_tri"),
        arguments({"method": 3}),
    ],
)
def test_what_is_left_to_vllm(engine_args):
    refuse_misspelled_method(engine_args)


def test_a_folder_of_that_name_is_a_model(tmp_path, monkeypatch):
    (tmp_path / "ngram_tri").mkdir()
    monkeypatch.chdir(tmp_path)
    refuse_misspelled_method(arguments({"model": "ngram_tri"}))
