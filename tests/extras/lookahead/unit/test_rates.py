"""Acceptance rates of candidates."""

import itertools

import pytest

from vllm_trie.extras.lookahead.candidates import CandidateTrie
from vllm_trie.extras.lookahead.pool import CONTEXT_LEN, Candidate
from vllm_trie.extras.lookahead.rates import acceptance_rate

KEYS = [*itertools.product(range(9), range(CONTEXT_LEN + 1), range(9), range(CONTEXT_LEN + 1))]


def test_better_candidates_are_likelier():
    for rank, num_matched, num_right, best in KEYS:
        rate = acceptance_rate(rank, num_matched, num_right, best)
        assert acceptance_rate(rank + 1, num_matched, num_right, best) <= rate


def test_a_path_has_the_product_of_its_tokens():
    candidates = [Candidate((1, 2), 3), Candidate((1, 4), 2), Candidate((5,), 2)]
    trie = CandidateTrie(candidates, 2)
    first, second = acceptance_rate(0, 3, 0, 3), acceptance_rate(0, 3, 1, 3)
    branched, other = acceptance_rate(1, 2, 1, 3), acceptance_rate(1, 2, 0, 3)
    assert trie.token_ids == [1, 2, 4, 5]
    assert trie.probabilities == pytest.approx([first, first * second, first * branched, other])
