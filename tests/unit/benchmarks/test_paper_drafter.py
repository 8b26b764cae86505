"""The n-gram-trie paper's drafter of examples/own_drafter, against its Algorithm 1."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paper_drafter import PaperDrafter

from tests.unit.drafters.support import VOCAB, by_path, end, make_drafter, make_request
from vllm_trie.tree import TokenTree

texts = st.lists(st.integers(0, 3), max_size=40)


def draft(text: list[int], prompt: int | None = None, **limits: object) -> TokenTree:
    options = {k: limits.pop(k) for k in ("ngram_size", "max_prefix_len") if k in limits}
    drafter = make_drafter(PaperDrafter.name, **options)
    request = make_request(text, num_prompt_tokens=prompt, **limits)
    [tree] = drafter.propose([request])
    tree.validate(VOCAB, 32)
    return tree


def algorithm1(
    prompt: list[int], text: list[int], ngram_size: int, prefix_len: int
) -> dict[tuple[int, ...], float]:
    """Return all drafts, with their frequency over that of the match: count every sub-prefix of
    every window, then back off from the last `prefix_len` tokens."""
    frequency: Counter[tuple[int, ...]] = Counter()
    for start in range(len(prompt)):
        window = prompt[start : start + ngram_size]
        frequency.update(tuple(window[:n]) for n in range(1, len(window) + 1))
    for length in range(min(prefix_len, len(text)), 0, -1):
        match = tuple(text[-length:])
        drafts = {
            gram[length:]: count
            for gram, count in frequency.items()
            if gram[:length] == match and 0 < len(gram) - length <= ngram_size - prefix_len
        }
        if drafts:
            total = sum(count for path, count in drafts.items() if len(path) == 1)
            return {path: count / total for path, count in drafts.items()}
    return {}


@given(texts, texts, st.integers(2, 8), st.integers(1, 4), st.integers(1, 32), st.integers(1, 8))
def test_drafts_are_those_of_algorithm_1(
    prompt, output, ngram_size, prefix_len, max_nodes, max_depth
):
    prefix_len, text = min(prefix_len, ngram_size - 1), prompt + output
    expected = algorithm1(prompt, text, ngram_size, prefix_len)
    expected = {path: value for path, value in expected.items() if len(path) <= max_depth}
    chosen = by_path(
        draft(
            text,
            len(prompt),
            ngram_size=ngram_size,
            max_prefix_len=prefix_len,
            max_nodes=max_nodes,
            max_depth=max_depth,
        )
    )
    assert len(chosen) == min(max_nodes, len(expected))
    for path, probability in chosen.items():
        np.testing.assert_allclose(probability, expected[path], rtol=1e-6)
    left_out = [value for path, value in expected.items() if path not in chosen]
    assert max(left_out, default=0.0) <= min(chosen.values(), default=1.0) * (1 + 1e-6)


def test_chain_only_follows_the_most_frequent_continuation():
    text = [1, 5, 6, 1, 7, 8, 1, 7, 9, 1]
    tree = draft(text, chain_only=True, max_depth=3)
    assert tree.is_chain
    assert tree.token_ids.tolist()[:2] == [7, 8]
    assert tree.num_nodes == 3


def test_a_request_that_comes_back_changed_is_indexed_again():
    drafter = make_drafter(PaperDrafter.name)
    drafter.propose([make_request([1, 2, 3, 1])])
    [tree] = drafter.propose([make_request([1, 5, 6, 1])])
    assert tree.token_ids.tolist()[:2] == [5, 6]
    end(drafter, "a")
    end(drafter, "a")


def test_a_window_holds_a_match_and_a_draft():
    with pytest.raises(ValueError, match="max_prefix_len=3 must be smaller than ngram_size=3"):
        make_drafter(PaperDrafter.name, ngram_size=3)
