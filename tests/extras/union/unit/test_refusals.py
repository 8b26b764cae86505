"""Unions that are refused, each with what to do."""

from __future__ import annotations

import pytest

from vllm_trie.drafts import registry

EAGLE = {"method": "eagle", "model": "some/head"}


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        (["eagle3"], "'eagle3' is a trained drafter and needs its checkpoint"),
        (
            [{"method": "ngram_trie"}],
            "'ngram_trie'.* allowed: dflash, draft_model, dspark, eagle, eagle3, mtp",
        ),
        (["ngram", {"method": "eagle"}], "needs 'model'"),
        (["ngram", {**EAGLE, "num_speculative_tokens": 99}], "less than or equal to 16"),
        (["ngram", {**EAGLE, "tokens": 1}], "tokens"),
        (["ngram", {**EAGLE, "num_alternatives": 2}], "num_alternatives=2 has no effect.*leave it"),
        (["ngram", EAGLE, {**EAGLE, "method": "eagle3"}], "'eagle3'.* one besides 'ngram_trie'"),
        (["ngram", "medusa", EAGLE], "'medusa_dynamic' and .*'eagle'.*; name one of them"),
        (["medusa"], "lacks 'ngram_trie'.*; add it, or ask for method 'medusa_dynamic'"),
        ([EAGLE], "lacks 'ngram_trie'.*; add it, or ask for method 'eagle' instead"),
        (["ngram", "lookahead_trie"], "'lookahead_trie' cannot be a part; allowed: medusa_dynamic"),
        (["ngram", "my_drafter"], "'my_drafter' cannot be a part.*ask for one as 'method'"),
        (["ngram", "ngram_trie"], "named twice"),
        ([], "at least 1 item"),
    ],
)
def test_wrong_entries(drafters, message):
    with pytest.raises(ValueError, match=message):
        registry.parse_options("trie_union", {"drafters": drafters})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adaptive": False}, "adaptive=False has no effect.*leave it out"),
        ({"options": {"eagle": {}}}, "'eagle', which is not one of the drafters"),
        ({"options": {"ngram": {"words": 1}}}, "words is not an option"),
        (
            {"options": {"ngram_trie": {"store_tokens": 0}, "ngram": {"recycle": False}}},
            "the keys 'ngram_trie' and 'ngram', which are one part; .* under one of them",
        ),
        (
            {"options": {"medusa": {"joint": "product"}}},
            "'product' has no.*'medusa_dynamic'",
        ),
        ({"options": {"medusa_dynamic": {"max_depth": 4}}}, "'max_depth'.*leave it out"),
        ({"options": {"medusa": {"max_context_len": 4}}}, "'max_context_len'.*leave it out"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        registry.parse_options("trie_union", options)
