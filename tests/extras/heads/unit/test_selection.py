"""The dynamic tree of the compiled core: the best paths of brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.drafts.ngrams import Candidates, Job, NativeBackend
from vllm_trie.extras.heads.candidates import BLEND
from vllm_trie.tree import TokenTree

VOCAB = 40


@st.composite
def candidates(draw, max_heads: int = 4, max_tokens: int = 12):
    """Tokens and probabilities [K, m] as heads give them, likeliest first."""
    num_heads = draw(st.integers(1, max_heads))
    num_tokens = draw(st.integers(1, max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    concentration = draw(st.sampled_from([0.05, 0.3, 1.0]))
    shares = rng.dirichlet(np.full(VOCAB, concentration), num_heads)
    shares = -np.sort(-shares, axis=1)[:, :num_tokens]
    tokens = np.stack([rng.permutation(VOCAB)[:num_tokens] for _ in range(num_heads)])
    return tokens.astype(np.int32), np.ascontiguousarray(shares, dtype=np.float32)


texts = st.one_of(
    st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, VOCAB - 1), max_size=80)
)


def brute_force(probabilities: np.ndarray, num_nodes: int) -> list[float]:
    """The largest products of all paths of all lengths: the whole Cartesian product, sorted."""
    values = [
        float(np.prod([probabilities[head, rank] for head, rank in enumerate(path)], dtype=float))
        for length in range(1, len(probabilities) + 1)
        for path in itertools.product(range(probabilities.shape[1]), repeat=length)
    ]
    return sorted(values, reverse=True)[:num_nodes]


def select(tokens, probabilities, max_nodes, max_depth, text=None) -> TokenTree:
    """The tree of the compiled core, of heads alone or with a text."""
    backend = NativeBackend(BLEND)
    index = None if text is None else backend.new_index(15)
    packed = np.array(text or [], dtype=np.int32)
    job = Job(index, None, None, packed, len(packed), max_nodes, max_depth, False)
    return backend.draft_batch([job], Candidates(tokens[None], probabilities[None]))[0].tree


@given(candidates(max_heads=3, max_tokens=6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_best_paths_are_those_of_brute_force(given_candidates, num_nodes):
    tokens, probabilities = given_candidates
    expected = brute_force(probabilities.astype(float), num_nodes)
    tree = select(tokens, probabilities, num_nodes, 9)
    selected = sorted(tree.probabilities.tolist(), reverse=True)
    assert selected == pytest.approx(expected, rel=1e-5)


@given(candidates(max_heads=3, max_tokens=8), texts)
@settings(max_examples=40, deadline=None)
def test_children_share_what_their_parent_has(given_candidates, text):
    """Probabilities are those of disjoint events: siblings add up to no more than the parent."""
    tree = select(*given_candidates, 64, 9, text)
    sums = np.zeros(tree.num_nodes + 1)
    for parent, probability in zip(tree.parents, tree.probabilities, strict=True):
        sums[parent] += probability
    assert sums[-1] <= 1.0 + 1e-5
    assert (sums[:-1] <= tree.probabilities + 1e-5).all()


def test_the_text_corrects_the_heads():
    """The heads name 1 or 2 and then 3 or 4, unaware of each other; in the text 4 follows 1."""
    tokens = np.array([[1, 2], [3, 4]], dtype=np.int32)
    shares = np.array([[0.6, 0.3], [0.5, 0.4]], dtype=np.float32)
    text = [1, 4, 7, 1, 4, 8, 1, 4, 9, 5]

    def child_of_1(tree: TokenTree) -> int:
        first = tree.token_ids.tolist().index(1)
        children = [i for i, p in enumerate(tree.parents) if p == first]
        return int(tree.token_ids[max(children, key=lambda i: tree.probabilities[i])])

    assert child_of_1(select(tokens, shares, 6, 2)) == 3
    assert child_of_1(select(tokens, shares, 6, 2, text)) == 4
