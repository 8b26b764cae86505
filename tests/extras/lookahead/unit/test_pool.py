from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.extras.lookahead.pool import Candidate, NgramPool

NGRAMS = st.lists(st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 2), st.integers(0, 2))))


@given(NGRAMS, st.integers(1, 4), st.integers(1, 12))
def test_pool_keeps_the_newest(ngrams, max_per_token, max_ngrams):
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
        assert [c.tokens for c in pool.after([first])] == expected
        assert len(expected) <= max_per_token


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(2, 4), st.integers(0, 10))
def test_text_gives_its_last_ngrams_with_their_context(tokens, size, start):
    pool = NgramPool(max_per_token=100, max_ngrams=10)
    pool.add_text(tokens, size, start)
    starts = range(max(start, len(tokens) - size + 1 - 10), len(tokens) - size + 1)
    ngrams = {tuple(tokens[i : i + size]): tokens[:i] for i in starts}  # the last one counts
    assert pool.num_ngrams == len(ngrams)
    for first in range(4):
        for before in ([], [2], [1, 2], [0, 1, 2], [3, 0, 1, 2]):
            for candidate in pool.after([*before, first]):
                context = ngrams[first, *candidate.tokens]
                matched = candidate.num_matched
                assert matched <= 3
                assert before[len(before) - matched :] == context[len(context) - matched :]
                if matched < min(3, len(before), len(context)):
                    assert before[-matched - 1] != context[-matched - 1]


def test_order_of_candidates():
    pool = NgramPool(max_per_token=5, max_ngrams=100)
    pool.add(1, (2, 3), before=(7, 8, 9))
    pool.add(1, (4, 5), before=(6, 9))
    pool.add(1, (6, 7))
    after = pool.after([7, 8, 9, 1])
    assert after == [Candidate((2, 3), 3), Candidate((4, 5), 1), Candidate((6, 7), 0)]
    pool.add(1, (2, 3))  # the window finds it too: it keeps what stood before it
    assert pool.after([9, 1])[0] == Candidate((2, 3), 1)
    assert pool.after([5]) == []
