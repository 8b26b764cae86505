"""The lookahead benchmark's independent verification computes more and accepts the same."""

from hypothesis import given
from hypothesis import strategies as st
from support.lookahead import CountedLookahead, IndependentLookahead, repeat_shared_prefixes

from tests.extras.lookahead.unit.test_lookahead import CANDIDATES, VOCAB
from tests.unit.drafters.decoding import Decoding, toy_target, verify
from tests.unit.drafters.support import make_context
from vllm_trie.extras.lookahead import LookaheadOptions
from vllm_trie.extras.lookahead.candidates import CandidateTrie


@given(candidates=CANDIDATES, depth=st.integers(1, 3))
def test_every_candidate_has_a_branch_of_its_own(candidates, depth):
    trie = CandidateTrie(candidates, depth).tree(100)
    tree = repeat_shared_prefixes(trie, candidates, depth)
    tree.validate(VOCAB, 100)
    assert tree.num_nodes == sum(len(c.tokens[:depth]) for c in candidates)
    target = toy_target(3)
    accepted = verify(tree, [1, 2], target).accepted
    assert accepted == verify(trie, [1, 2], target).accepted


def test_both_accept_the_same_and_are_counted():
    options = LookaheadOptions(window_size=4, pool_from_text=False, min_probability=0.0)
    context = make_context(num_nodes=64, vocab_size=VOCAB)
    decodings = [
        Decoding(drafter(options, context), [1, 2, 3], toy_target(VOCAB))
        for drafter in (CountedLookahead, IndependentLookahead)
    ]
    sums = [0, 0]
    for _ in range(60):
        new = [decoding.step() for decoding in decodings]
        assert new[0] == new[1]
        trie, independent = (decoding.tree for decoding in decodings)
        counts = [decoding.drafter.verification_nodes["a"] for decoding in decodings]
        window = int(trie.never_accept.sum())
        assert counts == [trie.num_nodes - window, independent.num_nodes - window]
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
    assert 0 < sums[0] < sums[1]
