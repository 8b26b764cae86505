from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.drafters.lookahead.pool import NgramPool

NGRAMS = st.lists(st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 2), st.integers(0, 2))))


@given(NGRAMS, st.integers(1, 4), st.integers(1, 12))
def test_pool_keeps_the_newest(
    ngrams: list[tuple[int, tuple[int, int]]], max_per_token: int, max_ngrams: int
) -> None:
    pool = NgramPool(max_per_token, max_ngrams)
    kept: list[tuple[int, tuple[int, int]]] = []  # oldest first
    for first, rest in ngrams:
        pool.add(first, rest)
        kept = [entry for entry in kept if entry != (first, rest)] + [(first, rest)]
        of_token = [entry for entry in kept if entry[0] == first]
        if len(of_token) > max_per_token:
            kept.remove(of_token[0])
        elif len(kept) > max_ngrams:
            newest = {entry[0]: i for i, entry in enumerate(kept)}
            stalest = min(newest, key=newest.__getitem__)
            kept.remove(next(entry for entry in kept if entry[0] == stalest))
        assert pool.num_ngrams == len(kept) <= max_ngrams
    for first in range(5):
        expected = [rest for token, rest in reversed(kept) if token == first]
        assert pool.after(first) == expected
        assert len(expected) <= max_per_token


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(2, 4))
def test_text_gives_its_last_ngrams(tokens: list[int], size: int) -> None:
    pool = NgramPool(max_per_token=100, max_ngrams=10)
    pool.add_text(tokens, size)
    for first in range(4):
        for rest in pool.after(first):
            ngram = [first, *rest]
            assert any(tokens[i : i + size] == ngram for i in range(len(tokens)))
    if len(tokens) >= size:
        last = tokens[-size:]
        assert pool.after(last[0])[0] == tuple(last[1:])
