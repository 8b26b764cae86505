"""The index against counts made the slow way, and the compiled core against its Python twin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.ngrams.backend import PythonBackend
from tests.oracles.ngrams.index import MAX_SUCCESSORS, NgramIndex, Node
from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngrams import Blend, Candidates, Job, NativeBackend, Source, native
from vllm_trie.tree import depth_first_layout

Gram = tuple[int, ...]

token = st.integers(-1, 3)
texts = st.lists(token, min_size=1, max_size=30)
# Add a text, or take out the one at this place among those that are left.
edits = st.lists(st.one_of(texts, st.integers(0, 5)), max_size=8)


def pieces(text: list[int]) -> list[Gram]:
    """The text, cut at its separators."""
    out: list[list[int]] = [[]]
    for item in text:
        if item < 0:
            out.append([])
        else:
            out[-1].append(item)
    return [tuple(piece) for piece in out]


def expected_counts(texts: list[list[int]], max_order: int) -> dict[Gram, tuple[int, int]]:
    """Occurrences and Kneser-Ney types of every n-gram, from its definition."""
    occurrences: Counter[Gram] = Counter()
    before: defaultdict[Gram, set[object]] = defaultdict(set)
    for piece in [piece for text in texts for piece in pieces(text)]:
        for start in range(len(piece)):
            for end in range(start + 1, min(len(piece), start + max_order + 1) + 1):
                gram = piece[start:end]
                occurrences[gram] += 1
                # Every beginning of a text counts as a token of its own.
                before[gram].add(piece[start - 1] if start else object())
    top = max_order + 1
    return {
        gram: (count, count if len(gram) == top else len(before[gram]))
        for gram, count in occurrences.items()
    }


def nodes_of(index: NgramIndex) -> dict[Gram, Node]:
    nodes: dict[Gram, Node] = {}
    stack: list[tuple[Gram, Node]] = [((), index.root)]
    while stack:
        path, node = stack.pop()
        for child in node.children.values():
            nodes[(*path, child.token)] = child
            stack.append(((*path, child.token), child))
    return nodes


def apply(index: NgramIndex | native.NativeIndex, edits: list[list[int] | int]) -> list[list[int]]:
    """Make the edits, each in two parts around the next one; returns the texts that are left."""
    left: list[tuple[int, list[int]]] = []
    finish: Callable[[], object] = int
    for edit in edits:
        if isinstance(edit, int):
            finish()
            finish = int
            if left:
                number, text = left.pop(edit % len(left))
                index.remove_text(number, len(text) // 2)
                finish = partial(index.remove_text, number)
        else:
            parts = np.array_split(np.array(edit, dtype=np.int32), 2)
            number = index.add_text(parts[0])
            finish()
            finish = partial(index.add_text, parts[1], number)
            left.append((number, edit))
    finish()
    return [text for _, text in left]


@given(edits, st.integers(1, 4))
def test_counts_are_those_of_the_texts_that_are_left(edits, max_order):
    index = NgramIndex(max_order)
    texts = apply(index, edits)
    expected = expected_counts(texts, max_order)
    nodes = nodes_of(index)
    for gram, node in nodes.items():
        assert (node.count, node.types) == expected[gram]
        assert node.once is None or node.count == 1 or len(gram) == max_order + 1
        assert {*node.hot, *node.cold} == set(node.children.values())
        assert len(node.hot) == min(len(node.children), MAX_SUCCESSORS)
        types = [child.types for child in node.hot]
        assert types == sorted(types, reverse=True)
    # What has no node occurred once, and so did what comes before its last token.
    for gram, (count, _) in expected.items():
        if gram not in nodes:
            assert count == 1
            assert expected[gram[:-1]][0] == 1
    assert index.num_tokens == sum(item >= 0 for text in texts for item in text)


OF_BOTH = BLEND._replace(min_order=1, min_left_for_heads=1e-6)
HEADS_BLEND = Blend(
    own=Source(0.2, 0.7),
    shared=Source(4.0, 0.8),
    shared_long=Source(0.1, 0.3),
    long_order=3,
    min_left_for_heads=1e-6,
    min_order=1,
)


@st.composite
def head_candidates(draw: st.DrawFn) -> Candidates:
    """Candidates of two jobs; those of some heads have no probability."""
    num_heads, num_candidates = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (2, num_heads, num_candidates)
    tokens = np.argsort(rng.random((*shape[:2], 9)), axis=-1)[..., :num_candidates]
    probabilities = -np.sort(-rng.dirichlet(np.full(num_candidates, 0.3), shape[:2]), axis=-1)
    probabilities[rng.random(shape[:2]) < 0.1] = draw(st.sampled_from([0.0, np.nan]))
    pairs = 2, num_heads - 1, num_candidates
    return Candidates(
        np.ascontiguousarray(tokens, dtype=np.int32),
        probabilities.astype(np.float32),
        rng.dirichlet(np.full(num_candidates, 0.3), pairs).astype(np.float32),
    )


def arrays_of(text: list[int], max_order: int) -> tuple[np.ndarray, ...]:
    """Nodes, table and tokens of an archive."""
    index, tokens = native.NativeIndex(max_order), np.array([*text, -1], dtype=np.int32)
    index.add_text(tokens)
    nodes, table = (np.frombuffer(array, dtype=np.int32).copy() for array in index.arrays())
    return nodes, table, tokens


def archive_of(arrays: tuple[np.ndarray, ...], max_order: int) -> native.NativeArchive:
    nodes, table, tokens = arrays
    return native.NativeArchive(nodes.view(np.uint8), table, tokens, max_order, 9)


def test_an_archive_that_leads_out_of_its_arrays_is_refused():
    archive_of(arrays_of([*range(9)], 8), 8)
    changed = [arrays_of([*range(9)], 8) for _ in range(3)]
    changed[0][0][8 + 7] = 1  # the first node's text is another one
    changed[1][1][:] = 1  # a search for a free place of the table has no end
    changed[2][2][0] = 9
    for arrays in (*changed, arrays_of([*range(10)], 8)):
        with pytest.raises(ValueError, match="do not form an n-gram index"):
            archive_of(arrays, 8)


@given(
    edits,
    st.one_of(st.none(), texts),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 8),
    st.integers(0, 40),
    st.tuples(
        st.integers(1, 40),
        st.integers(1, 12),
        st.booleans(),
        st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    ),
    st.one_of(st.none(), head_candidates()),
    st.sampled_from([BLEND, OF_BOTH, HEADS_BLEND]),
    st.integers(0, 4),
)
def test_compiled_core_equals_its_twin(
    edits, archived, text, max_order, num_indexed, limits, candidates, blend, answer
):
    backends = (NativeBackend(blend), PythonBackend(blend))
    in_order = candidates and candidates._replace(transitions=None)
    no_candidates = candidates and Candidates(candidates.tokens[:0], candidates.probabilities[:0])
    archives = None, None
    if archived is not None:
        archives = archive_of(arrays_of(archived, max_order), max_order), NgramIndex(max_order)
        archives[1].add_text(np.array([*archived, -1], dtype=np.int32))
    drafts = []
    for backend, archive in zip(backends, archives, strict=True):
        store = backend.new_index(max_order)
        apply(store, edits)
        index = backend.new_index(max_order)
        tokens = np.array(text, dtype=np.int32)
        num_indexed = min(num_indexed, len(text))
        shorter = Job(index, store, archive, tokens[: len(text) // 2], 0, *limits)
        job = Job(index, store, archive, tokens, num_indexed, *limits)
        half = shorter._replace(num_indexed=min(num_indexed, len(text) // 2))
        answered = job._replace(answer=answer, output_begin=max(0, len(text) - 1 - answer))
        heads_alone = Job(None, None, None, tokens, 0, *limits)
        assert backend.draft_batch([], no_candidates) == []
        drafts.append([*backend.draft_batch([half])])
        drafts[-1] += backend.draft_batch([job, shorter], in_order)
        drafts[-1] += backend.draft_batch([heads_alone, job], candidates)
        drafts[-1] += backend.draft_batch([half, answered, answered])
        drafts[-1] += backend.draft_batch([job._replace(num_indexed=num_indexed // 2)])
        drafts[-1] += backend.draft_batch([job._replace(max_nodes=-3)] * 2)
        drafts[-1] += backend.draft_batch([job._replace(max_nodes=0), job._replace(max_depth=0)])
        drafts[-1].append((store.num_tokens, store.num_nodes, index.num_nodes))
    assert drafts[0].pop() == drafts[1].pop()
    assert [draft.tree.num_nodes for draft in drafts[0][-4:]] == [0, 0, 0, 0]
    max_nodes, max_depth, chain_only, min_probability = limits
    for compiled, readable in zip(*drafts, strict=True):
        assert compiled.used_text == readable.used_text
        assert compiled.tree.token_ids.tolist() == readable.tree.token_ids.tolist()
        assert compiled.tree.parents.tolist() == readable.tree.parents.tolist()
        if compiled.tree.num_nodes:
            assert compiled.tree.probabilities.tolist() == readable.tree.probabilities.tolist()
            assert compiled.tree.probabilities.min() >= np.float32(min_probability)
        compiled.tree.validate(9, max_nodes)
        assert compiled.tree.depths().max(initial=0) <= max_depth
        assert compiled.tree.is_chain or not chain_only
        ordered = depth_first_layout(compiled.tree)
        assert ordered.token_ids.tolist() == compiled.tree.token_ids.tolist()
        assert ordered.parents.tolist() == compiled.tree.parents.tolist()


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_twins_agree_on_contexts_with_many_successors(seed):
    """More successors than are kept in order, with additions and removals."""
    results = []
    for backend in (NativeBackend(BLEND), PythonBackend(BLEND)):
        rng = np.random.default_rng(seed)
        store = backend.new_index(2)
        numbers = []
        for _ in range(12):
            if numbers and rng.random() < 0.3:
                store.remove_text(numbers.pop(rng.integers(len(numbers))))
            # Small token ids are frequent.
            text = (120 * rng.random(60) ** 3).astype(np.int32)
            numbers.append(store.add_text(text))
        job = Job(backend.new_index(2), store, None, np.array([0], np.int32), 1, 100, 3, False)
        results.append(backend.draft_batch([job])[0].tree)
    assert results[0].num_nodes == 100
    for name in ("token_ids", "parents", "probabilities"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name))


def test_token_ids_up_to_the_largest():
    largest = 2**31 - 1
    text = np.array([largest, largest - 1, 0] * 3, dtype=np.int32)
    backend = NativeBackend(BLEND)
    job = Job(backend.new_index(8), None, None, text, len(text), 8, 8, False)
    [draft] = backend.draft_batch([job])
    assert draft.tree.token_ids.tolist()[:3] == [largest, largest - 1, 0]


@pytest.mark.parametrize("kind", ["random", "constant", "periodic", "tail"])
def test_long_prompts_take_linear_time_and_bounded_memory(kind):
    """Every token makes at most `max_order + 1` nodes, whatever the text."""
    size = 100_000
    random = np.random.default_rng(0)
    text = {
        "random": random.integers(0, 32_000, size),
        "constant": np.zeros(size),
        "periodic": np.arange(size) % 7,
        "tail": np.r_[random.integers(0, 2, size // 2), np.zeros(size // 2)],
    }[kind].astype(np.int32)
    backend = NativeBackend(BLEND)
    index = backend.new_index(8)
    [draft] = backend.draft_batch([Job(index, None, None, text, size, 32, 64, False)])
    assert draft.tree.num_nodes > 0
    assert index.num_nodes <= 9 * size
    if kind in ("constant", "periodic"):
        assert index.num_nodes < 100, "a text that repeats itself has few distinct n-grams"


def test_removing_what_is_not_there():
    index = native.NativeIndex(3)
    with pytest.raises(KeyError, match="no text 5"):
        index.remove_text(5)
