"""What the model named after rejected nodes, drafted later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.support import by_path, make_drafter, make_request
from vllm_trie.drafters import VerifiedStep
from vllm_trie.drafters.ngram_trie import recycling
from vllm_trie.drafters.ngram_trie.drafter import BLEND
from vllm_trie.drafters.ngram_trie.recycling import Recycling, observed_rows
from vllm_trie.ngrams import Job, NativeBackend, PythonBackend
from vllm_trie.tree import TokenTree

TREE = TokenTree.from_lists([10, 11, 20, 21], [-1, 0, -1, 2], [0.5, 0.4, 0.3, 0.2])
"""Two branches after the root."""


def verified(
    text: Sequence[int], accepted: Sequence[int], argmax: Sequence[int], **more: Any
) -> Any:
    step = VerifiedStep(TREE, tuple(accepted), np.array(argmax, dtype=np.int32))
    return make_request(text, last_step=step, **more)


def test_each_context_is_followed_by_the_models_own_token() -> None:
    request = verified([1, 2, 10, 11, 50], [0, 1], [10, 11, 50, 60, 70])
    rows = observed_rows(request, 2)
    assert rows is not None
    assert rows.tolist() == [[1, 2, 10], [2, 10, 11], [10, 11, 50], [2, 20, 60], [20, 21, 70]]


@pytest.mark.parametrize(
    ("request_", "num_tokens"),
    [
        (verified([11, 50], [], [10, 11, 50, 60, 70]), 1),
        (verified([1, 2, 10, 12, 50], [0, 1], [10, 11, 50, 60, 70]), 2),
        (verified([1, 2, 10, 11, 50], [0, 1], [10, 11, 50, 60, 70]), 3),
        (verified([1, 2, 10], [], [10, 11, 50]), 2),
        (make_request([1, 2, 3], last_step=VerifiedStep(TREE, (), None)), 2),
    ],
    ids=["one token", "other tokens", "a draft before", "not all verified", "unknown"],
)
def test_steps_that_do_not_fit_the_text_teach_nothing(request_: Any, num_tokens: int) -> None:
    assert observed_rows(request_, num_tokens) is None


def test_nodes_that_were_not_verified_teach_nothing() -> None:
    rows = observed_rows(verified([1, 2, 10], [], [10, -1, -1, 60, -1]), 2)
    assert rows is not None
    assert rows.tolist() == [[1, 2, 10], [2, 20, 60]]


def test_a_part_of_the_accepted_path_is_enough() -> None:
    """As a part of the union sees a path that leaves its own tree."""
    rows = observed_rows(verified([1, 2, 10, 77, 78], [0], [10, 77, -1, 60, 70]), 2)
    assert rows is not None
    assert rows.tolist() == [[1, 2, 10], [2, 10, 77], [2, 20, 60], [20, 21, 70]]


def drafted_after(text: list[int], salt: str | None, recycle: bool = True) -> set[int]:
    """First tokens of the draft after `text`, once a request with salt "a" had a step."""
    drafter = make_drafter(recycle=recycle)
    drafter.propose([make_request([1, 2], "first", cache_salt="a")])
    step = verified([1, 2, 10], [], [10, 11, 50, 60, 70], request_id="first", cache_salt="a")
    drafter.propose([step])
    drafter.release("first")
    [tree] = drafter.propose([make_request(text, "second", cache_salt=salt)])
    return {path[0] for path in by_path(tree) if len(path) == 1}


def test_rejected_branches_are_drafted_from() -> None:
    assert 60 in drafted_after([5, 2, 20], "a"), "by the last token"
    assert 70 in drafted_after([5, 20, 21], "a"), "by the last two"
    assert 60 not in drafted_after([5, 2, 20], "a", recycle=False)


@pytest.mark.parametrize("salt", [None, "b"])
def test_requests_with_another_salt_learn_nothing(salt: str | None) -> None:
    assert not drafted_after([5, 20, 21], salt) & {10, 11, 50, 60, 70}


def test_forgotten_salts_are_new_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "MAX_SCOPES", 2)
    table = Recycling(PythonBackend(BLEND))
    assert [table.scope(salt) for salt in ("a", "b", "a", "c", "a", "b")] == [0, 1, 0, 2, 0, 3]


rows = st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=300)


@given(
    st.lists(st.tuples(st.integers(0, 2), rows, st.integers(1, 90)), max_size=4),
    st.lists(st.integers(0, 5), max_size=20),
    st.integers(2, 6),
    st.booleans(),
)
def test_compiled_table_equals_its_twin(
    observed: list[tuple[int, list[tuple[int, int, int]], int]],
    text: list[int],
    size_log2: int,
    chain_only: bool,
) -> None:
    """Tables so small that contexts are evicted, and counts so large that they are halved."""
    tokens = np.array(text, dtype=np.int32)
    trees = []
    for backend in (NativeBackend(BLEND), PythonBackend(BLEND)):
        table = backend.new_recycled(size_log2)
        for scope, rows, times in observed:
            table.observe(scope, np.array(rows * times, dtype=np.int32).reshape(-1, 3))
        jobs = [
            Job(backend.new_index(4), None, None, tokens, len(text), 40, 6, chain_only)._replace(
                recycled=table, scope=scope
            )
            for scope in range(4)
        ]
        trees.append([draft.tree for draft in backend.draft_batch(jobs)])
    for compiled, readable in zip(*trees, strict=True):
        assert by_path(compiled) == by_path(readable)
        assert compiled.token_ids.tolist() == readable.token_ids.tolist()
