"""What no well-behaved model or scheduler says must neither crash the compiled code nor part it
from its twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.ngrams.backend import PythonBackend
from vllm_trie.drafts.ngrams import Job, NativeBackend
from vllm_trie.extras.heads.candidates import BLEND, top_candidates
from vllm_trie.tree import TokenTree

BACKENDS = [NativeBackend, PythonBackend]


def draft(backend_class: type, logits: torch.Tensor, *jobs: tuple, m: int = 8) -> list[TokenTree]:
    """Trees of (text, max_nodes, max_depth) for each row of logits."""
    backend = backend_class(BLEND)
    made = [
        Job(
            *(backend.new_index(15), None, None, np.array(text, dtype=np.int32), len(text)),
            *(nodes, depth, False),
        )
        for text, nodes, depth in jobs
    ]
    candidates = top_candidates(logits, torch.ones(len(logits)), None, m)
    return [draft.tree for draft in backend.draft_batch(made, candidates)]


values = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1.0, float("nan"), float("inf"), float("-inf")]),
)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_trees_stay_valid_for_any_logits(data):
    heads, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 80))
    flat = data.draw(st.lists(values, min_size=heads * size, max_size=heads * size))
    logits = torch.tensor(flat, dtype=torch.float32).view(heads, 1, size)
    text = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    job = (text, data.draw(st.integers(1, 70)), data.draw(st.integers(1, 9)))
    for backend in BACKENDS:
        [tree] = draft(backend, logits, job, m=data.draw(st.integers(1, 100)))
        tree.validate(size, job[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_softmax_the_text_drafts_alone(backend):
    logits = torch.full((2, 2, 50), torch.nan)
    alone, nothing = draft(backend, logits, ([7, 8, 9] * 5, 6, 6), ([], 6, 6))
    assert alone.chain().token_ids.tolist()[:3] == [7, 8, 9]
    assert nothing.num_nodes == 0


def test_no_room_is_no_tree():
    trees = draft(NativeBackend, torch.randn(2, 3, 9), ([1], 0, 4), ([1], 4, 0), ([1], -3, 4))
    assert [tree.num_nodes for tree in trees] == [0, 0, 0]
    assert draft(NativeBackend, torch.randn(2, 0, 9)) == []
