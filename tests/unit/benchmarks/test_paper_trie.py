"""The n-gram-trie paper's drafter: index, node choice and options."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paper_trie import FrequencyTrie, PaperDrafter

from tests.unit.drafters.support import VOCAB, by_path, make_drafter, make_request
from vllm_trie.tree import TokenTree

texts = st.lists(st.integers(0, 3), max_size=40)


def draft(text: list[int], **arguments: object) -> TokenTree:
    options = {
        name: arguments.pop(name)
        for name in ("ngram_size", "max_prefix_len", "index_output")
        if name in arguments
    }
    drafter = make_drafter(PaperDrafter.name, **options)
    [tree] = drafter.propose([make_request(text, **arguments)])  # type: ignore[arg-type]
    tree.validate(VOCAB, 32)
    return tree


@given(texts, st.integers(2, 6))
def test_frequencies_count_occurrences(text: list[int], ngram_size: int) -> None:
    trie = FrequencyTrie(ngram_size)
    middle = len(text) // 3
    trie.append(text[:middle])
    trie.append(text[middle:])
    counts = Counter(
        tuple(text[i : i + n]) for n in range(1, ngram_size + 1) for i in range(len(text) - n + 1)
    )
    for path, count in counts.items():
        node = trie.find(path)
        assert node is not None
        assert node.frequency == count
    if len(text) > ngram_size:
        assert trie.find(text[: ngram_size + 1]) is None
    assert trie.find([9]) is None


@given(texts, st.integers(2, 8), st.integers(1, 4), st.integers(1, 32), st.integers(1, 8))
def test_drafts_the_most_frequent_continuations_of_the_longest_known_suffix(
    text: list[int], ngram_size: int, prefix: int, max_nodes: int, max_depth: int
) -> None:
    prefix = min(prefix, ngram_size - 1)
    tree = draft(
        text,
        ngram_size=ngram_size,
        max_prefix_len=prefix,
        max_nodes=max_nodes,
        max_depth=max_depth,
    )
    chosen = by_path(tree)
    for length in range(min(prefix, len(text)), 0, -1):
        suffix = text[-length:]
        starts = [i for i in range(length, len(text)) if text[i - length : i] == suffix]
        if starts:
            break
    else:
        assert not chosen
        return
    deepest = min(ngram_size - length, max_depth)
    continuations = Counter(
        tuple(text[i : i + n]) for i in starts for n in range(1, deepest + 1) if i + n <= len(text)
    )
    assert len(chosen) == min(max_nodes, len(continuations))
    worst = min(continuations[path] for path in chosen)
    for path, count in continuations.items():
        assert path in chosen or count <= worst
    for path, probability in chosen.items():
        np.testing.assert_allclose(probability, continuations[path] / len(starts), rtol=1e-6)


def test_backs_off_to_shorter_suffixes() -> None:
    assert draft([5, 1, 2, 7, 8, 1, 2]).token_ids.tolist()[:2] == [7, 8]
    assert draft([5, 2, 7, 8, 1, 2]).token_ids.tolist()[:2] == [7, 8]
    assert draft([1, 2, 3]).num_nodes == 0
    assert draft([]).num_nodes == 0


def test_chain_only_follows_the_most_frequent_continuation() -> None:
    text = [1, 5, 6, 1, 7, 8, 1, 7, 9, 1]
    tree = draft(text, chain_only=True, max_depth=3)
    assert tree.is_chain
    assert tree.token_ids.tolist()[:2] == [7, 8]
    assert tree.num_nodes == 3


def test_output_is_left_out_on_request() -> None:
    text = [1, 2, 3, 4, 5, 4]
    assert draft(text, num_prompt_tokens=3).token_ids.tolist()[0] == 5
    assert draft(text, num_prompt_tokens=3, index_output=False).num_nodes == 0


def test_a_request_that_comes_back_changed_is_indexed_anew() -> None:
    drafter = make_drafter(PaperDrafter.name)
    drafter.propose([make_request([1, 2, 3, 1])])
    [tree] = drafter.propose([make_request([1, 5, 6, 1])])
    assert tree.token_ids.tolist()[:2] == [5, 6]
    drafter.release("a")
    drafter.release("a")


def test_a_window_holds_a_match_and_a_guess() -> None:
    with pytest.raises(ValueError, match="max_prefix_len=3 must be smaller than ngram_size=3"):
        make_drafter(PaperDrafter.name, ngram_size=3)
