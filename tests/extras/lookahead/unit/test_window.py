from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.extras.lookahead.unit.reference import TwoBranchDecoder, visible
from tests.unit.drafters.decoding import toy_target
from vllm_trie.extras.lookahead.candidates import CandidateTrie
from vllm_trie.extras.lookahead.options import window_nodes
from vllm_trie.extras.lookahead.pool import Candidate
from vllm_trie.extras.lookahead.window import Window

SIZES = st.tuples(st.integers(1, 7), st.integers(3, 6))


def _filled(window_size: int, ngram_size: int, steps: int) -> tuple[Window, TwoBranchDecoder]:
    """A window and the reference after `steps` steps over the same toy model."""
    target = toy_target(13)
    first = random.Random(0).choices(range(13), k=Window.start_size(window_size, ngram_size))
    window = Window(first, ngram_size)
    reference = TwoBranchDecoder(target, [1, 2, 3], first, ngram_size, num_candidates=1000)
    for _ in range(steps):
        _assert_equal(window, reference)
        cells = reference.cells()
        highest = max(cell.level for cell in cells)
        results = [
            target([*reference.tokens, *(c.token for c in visible(cells, cell))])
            for cell in cells
            if cell.level == highest
        ]
        last = reference.tokens[-1]
        ngrams = window.advance(last, results)
        reference.step()
        for first_token, *rest in ngrams:
            assert tuple(rest) in reference.pool[first_token]
    return window, reference


def _assert_equal(window: Window, reference: TwoBranchDecoder) -> None:
    assert window.token_ids == [cell.token for cell in reference.cells()]


@given(SIZES, st.integers(0, 20))
def test_comb_and_candidates_have_the_two_branch_mask(sizes, steps):
    """Ancestors and depths of the tree are the mask and the positions of the paper's two branches:
    a window token sees level 0 up to its column and its own column below it, a candidate's token
    what comes before it in its candidate, and neither branch sees the other."""
    window, reference = _filled(*sizes, steps)
    candidates = [(5, 6, 7), (5, 6, 8), (9, 5, 6)]
    trie = CandidateTrie([Candidate(c, 0) for c in candidates], 3).tree(20)
    tree = window.append_to(trie)
    mask, depths = tree.ancestor_mask(), tree.depths()

    cells = reference.cells()
    expected = np.zeros((len(cells), len(cells)), dtype=bool)
    for row, cell in enumerate(cells):
        for column, other in enumerate(cells):
            expected[row, column] = other in visible(cells, cell)
    first = trie.num_nodes
    assert (mask[first:, first:] == expected).all()
    assert not mask[first:, :first].any()
    assert not mask[:first, first:].any()
    assert depths[first:].tolist() == [cell.level + cell.column for cell in cells]
    assert tree.never_accept.tolist() == [False] * first + [True] * len(cells)

    # Candidates: one row for each distinct prefix, which sees its own prefixes only.
    prefixes = {c[: n + 1] for c in candidates for n in range(len(c))}
    assert first == len(prefixes)
    for node in range(first):
        path = tuple(tree.token_ids[:first][mask[node, :first]].tolist())
        assert path in prefixes
        assert depths[node] == len(path)
    tree.validate(vocab_size=13, max_nodes=tree.num_nodes)


@pytest.mark.parametrize(("window_size", "ngram_size"), [(1, 3), (1, 5), (10, 5), (7, 4)])
def test_sizes(window_size, ngram_size):
    window = Window(range(Window.start_size(window_size, ngram_size)), ngram_size)
    depth = window.depth
    while not window.is_filled:
        assert window.num_nodes <= window_nodes(window_size, ngram_size)
        width = window.highest_level.stop - window.highest_level.start
        assert window.advance(0, list(range(width))) == []
        assert window.depth == depth
    assert window.num_nodes == window_size * (ngram_size - 1) - 1
    assert len(window.advance(0, list(range(window_size)))) == window_size
    assert window.num_nodes == window_size * (ngram_size - 1) - 1
