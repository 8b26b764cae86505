"""The dynamic tree: exact against brute force, and the compiled selection against its twin."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.ngrams.backend import PythonBackend
from tests.oracles.ngrams.index import NgramIndex
from vllm_trie.drafters.medusa.candidates import BLEND
from vllm_trie.ngrams import Candidates, Job, NativeBackend
from vllm_trie.tree import TokenTree, depth_first_layout

VOCAB = 40


class Limits(NamedTuple):
    """Limits of one tree."""

    max_nodes: int
    max_depth: int
    chain_only: bool = False
    min_probability: float = 0.0


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


limits = st.builds(
    Limits,
    st.integers(1, 70),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([0.0, 0.0, 1e-3, 0.05]),
)
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


def algorithm1(probabilities: np.ndarray, num_nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the best paths of ranks by product, with their probabilities, likeliest first.

    Algorithm 1 of "Acceleration of Multiple Heads Decoding for LLM via Dynamic Tree Attention", as
    the paper has it. Layer by layer, each head extends every path in a queue bounded to
    `num_nodes`; paths that fall out of it cannot have a child in it. `probabilities`: [K, m].
    """
    queue: list[tuple[float, tuple[int, ...]]] = []  # a min-heap of at most num_nodes paths
    layer: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for shares in probabilities.tolist():
        extended = []
        for above, path in layer:
            for rank, share in enumerate(shares):
                candidate = (above * share, (*path, rank))
                if len(queue) < num_nodes:
                    heapq.heappush(queue, candidate)
                elif candidate > queue[0]:
                    heapq.heapreplace(queue, candidate)
                else:
                    break
                extended.append(candidate)
        kept = set(queue)
        layer = [candidate for candidate in extended if candidate in kept]
    return [(path, value) for value, path in sorted(queue, key=lambda item: (-item[0], item[1]))]


def make_job(index, text, limit: Limits) -> Job:
    return Job(index, None, None, np.array(text, dtype=np.int32), len(text), *limit)


def select_one(backend, candidates_of_one, limit, index, text=()) -> TokenTree:
    tokens, probabilities = candidates_of_one
    candidates = Candidates(tokens[None], probabilities[None])
    return backend.draft_batch([make_job(index, text, limit)], candidates)[0].tree


def select(tokens, probabilities, limit, index=None, text=()) -> TokenTree:
    """The readable twin's tree."""
    return select_one(PythonBackend(BLEND), (tokens, probabilities), limit, index, text)


def same(left: TokenTree, right: TokenTree) -> bool:
    return all(
        getattr(left, name).tolist() == getattr(right, name).tolist()
        for name in ("token_ids", "parents", "probabilities")
    )


@given(candidates(max_heads=3, max_tokens=6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_best_paths_are_those_of_brute_force(given_candidates, num_nodes):
    tokens, probabilities = given_candidates
    expected = brute_force(probabilities.astype(float), num_nodes)
    tree = select(tokens, probabilities, Limits(num_nodes, 9))
    selected = sorted(tree.probabilities.tolist(), reverse=True)
    assert selected == pytest.approx(expected, rel=1e-5)
    paper = algorithm1(probabilities.astype(float), num_nodes)
    assert [value for _, value in paper] == pytest.approx(expected, rel=1e-9)


@given(candidates(), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_algorithm1_has_every_parent(given_candidates, num_nodes):
    paths = {path for path, _ in algorithm1(given_candidates[1].astype(float), num_nodes)}
    # With equal probabilities a path may be kept for its parent's sake only by the tie-break.
    values = dict(algorithm1(given_candidates[1].astype(float), num_nodes))
    for path in paths:
        assert len(path) == 1 or path[:-1] in paths or values[path] == 0.0


@given(candidates(), limits, texts, st.booleans())
@settings(max_examples=120, deadline=None)
def test_compiled_selection_is_its_twin(given_candidates, limit, text, with_text):
    trees = []
    for backend in (NativeBackend(BLEND), PythonBackend(BLEND)):
        index = backend.new_index(15) if with_text else None
        trees.append(select_one(backend, given_candidates, limit, index, text))
    assert same(*trees)


@given(candidates(), limits, texts)
@settings(max_examples=60, deadline=None)
def test_trees_obey_the_limits(given_candidates, limit, text):
    for index in (None, NgramIndex(15)):
        tree = select(*given_candidates, limit, index, text)
        tree.validate(VOCAB, limit.max_nodes)
        assert tree.num_nodes > 0 or limit.min_probability > 0.0
        assert tree.depths().max(initial=0) <= limit.max_depth
        assert (tree.probabilities >= np.float32(limit.min_probability)).all()
        assert same(tree, depth_first_layout(tree))
        if limit.chain_only:
            assert tree.is_chain


@given(candidates(max_heads=3, max_tokens=8), texts)
@settings(max_examples=40, deadline=None)
def test_children_share_what_their_parent_has(given_candidates, text):
    """Probabilities are those of disjoint events: siblings add up to no more than the parent."""
    tree = select(*given_candidates, Limits(64, 9), NgramIndex(15), text)
    sums = np.zeros(tree.num_nodes + 1)
    for parent, probability in zip(tree.parents, tree.probabilities, strict=True):
        sums[parent] += probability
    assert sums[-1] <= 1.0 + 1e-5
    assert (sums[:-1] <= tree.probabilities + 1e-5).all()


def test_without_repetition_the_text_changes_nothing():
    tokens = np.array([[30, 31], [32, 33]], dtype=np.int32)
    shares = np.array([[0.6, 0.3], [0.5, 0.2]], dtype=np.float32)
    plain = select(tokens, shares, Limits(6, 2))
    assert same(plain, select(tokens, shares, Limits(6, 2), NgramIndex(15), list(range(20))))


def test_the_text_corrects_the_heads():
    """The heads name 1 or 2 and then 3 or 4, unaware of each other; in the text 4 follows 1."""
    tokens = np.array([[1, 2], [3, 4]], dtype=np.int32)
    shares = np.array([[0.6, 0.3], [0.5, 0.4]], dtype=np.float32)
    text = [1, 4, 7, 1, 4, 8, 1, 4, 9, 5]

    def child_of_1(tree: TokenTree) -> int:
        first = tree.token_ids.tolist().index(1)
        children = [i for i, p in enumerate(tree.parents) if p == first]
        return int(tree.token_ids[max(children, key=lambda i: tree.probabilities[i])])

    assert child_of_1(select(tokens, shares, Limits(6, 2))) == 3
    assert child_of_1(select(tokens, shares, Limits(6, 2), NgramIndex(15), text)) == 4


def test_the_text_goes_deeper_than_the_heads():
    text = list(range(10, 30)) * 3
    tokens, shares = np.array([[10]], dtype=np.int32), np.array([[0.9]], dtype=np.float32)
    tree = select(tokens, shares, Limits(12, 12), NgramIndex(15), text)
    assert tree.chain().token_ids.tolist()[:5] == [10, 11, 12, 13, 14]


def test_a_changed_text_is_indexed_anew():
    backend = NativeBackend(BLEND)
    index = backend.new_index(15)
    head = np.array([[9]], dtype=np.int32), np.array([[0.01]], dtype=np.float32)
    first = [1, 2, 3] * 10
    second = [1, 4, 5] * 9

    def draft(index, text):
        return select_one(backend, head, Limits(8, 8), index, text)

    draft(index, first)
    assert same(draft(index, second), draft(backend.new_index(15), second))


@given(st.lists(st.tuples(limits, texts), min_size=1, max_size=4), candidates(4, 8))
@settings(max_examples=20, deadline=None)
def test_a_batch_is_its_requests(batch, given_candidates):
    backend = NativeBackend(BLEND)
    shift = np.arange(len(batch), dtype=np.int32)[:, None, None]  # other tokens for each request
    tokens = (given_candidates[0] + shift) % VOCAB
    probabilities = np.repeat(given_candidates[1][None], len(batch), axis=0)
    jobs = [make_job(backend.new_index(15), text, limit) for limit, text in batch]
    together = backend.draft_batch(jobs, Candidates(tokens, probabilities))
    for i, (limit, text) in enumerate(batch):
        alone = (tokens[i], probabilities[i])
        assert same(
            together[i].tree, select_one(backend, alone, limit, backend.new_index(15), text)
        )
