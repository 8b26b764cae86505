"""What the model held likely in earlier steps, drafted later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.ngrams.backend import PythonBackend
from tests.oracles.ngrams.recycled import RecycledTable, rows_of
from tests.unit.drafters.support import by_path, end, make_drafter, make_request
from vllm_trie.drafts import LogitsRows
from vllm_trie.drafts.ngram_trie import recycling
from vllm_trie.drafts.ngram_trie.drafter import BLEND, SAMPLED
from vllm_trie.drafts.ngram_trie.recycling import Recycling
from vllm_trie.drafts.ngrams import Job, NativeBackend
from vllm_trie.drafts.ngrams.native import ROW_TOKENS, NativeRecycled
from vllm_trie.tree import TokenTree

TREE = TokenTree.from_lists([10, 11, 20, 21], [-1, 0, -1, 2], [0.5, 0.4, 0.3, 0.2])
"""Two branches after the root."""
RATES = np.float32([0.5, 0.2, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01])


def stepped(text: Sequence[int], accepted: Sequence[int], first: Sequence[int], **more: Any) -> Any:
    """A request after a step with `TREE`; `first` names each row's likeliest token, and those after
    it come next."""
    tokens = np.array(first, dtype=np.int32)[:, None] + np.arange(ROW_TOKENS, dtype=np.int32)
    rows = LogitsRows(TREE, tuple(accepted), tokens, np.tile(RATES, (len(first), 1)))
    return make_request(text, rows=rows, **more)


def drafted_after(text: list[int], salt: str | None, recycle: bool = True) -> set[int]:
    """First tokens of the draft after `text`, once a request with salt "a" had a step."""
    drafter = make_drafter(recycle=recycle)
    step = stepped([1, 2, 10], [], [10, 110, 50, 60, 70], request_id="first", cache_salt="a")
    drafter.propose([step])
    end(drafter, "first")
    [tree] = drafter.propose([make_request(text, "second", cache_salt=salt)])
    return {path[0] for path in by_path(tree) if len(path) == 1}


def test_rejected_branches_are_drafted_from():
    assert {60, 61, 62} <= drafted_after([5, 2, 20], "a"), "by the last two tokens"
    assert {60, 61, 62} <= drafted_after([5, 6, 20], "a"), "by the last one"
    assert 60 not in drafted_after([5, 2, 20], "a", recycle=False)


def test_what_was_likely_in_answers_to_the_prompt_comes_first():
    """Two prompts make the model go on differently after the same three tokens."""
    drafter = make_drafter()
    for prompt, likely in ((300, 80), (400, 90), (400, 90), (400, 90)):
        first = [likely, 110, 50, 60, 70]
        request = stepped([prompt, 1, 2, 10], [], first, request_id="x", num_prompt_tokens=1)
        drafter.propose([request])
        end(drafter, "x")
    for prompt, likely in ((300, 80), (400, 90), (500, 90)):
        [tree] = drafter.propose([make_request([prompt, 7, 1, 2], "y", num_prompt_tokens=1)])
        end(drafter, "y")
        best = max((p, path) for path, p in by_path(tree).items() if len(path) == 1)
        assert best[1] == (likely,)


@pytest.mark.parametrize("salt", [None, "b"])
def test_requests_with_another_salt_learn_nothing(salt):
    assert not drafted_after([5, 20, 21], salt) & {10, 50, 60, 70}


def test_the_last_step_tells_what_may_follow():
    drafter = make_drafter()
    # The model says 13 in place of both branches: after these it held 110 and 60 likely.
    [tree] = drafter.propose([stepped([1, 2, 13], [], [13, 110, 50, 60, 70])])
    first = {path[0] for path in by_path(tree) if len(path) == 1}
    assert {110, 60} <= first, "after rejected siblings"
    assert {14, 15} <= first, "in place of the last token"
    [tree] = drafter.propose([stepped([1, 2, 13, 10, 11, 12], [0, 1], [10, 11, 12, 60, 70])])
    first = {path[0] for path in by_path(tree) if len(path) == 1}
    assert {13, 14} <= first, "in place of the token after accepted nodes"


def test_forgotten_salts_leave_nothing(monkeypatch):
    monkeypatch.setattr(recycling, "MIN_SCOPES", 2)
    kept = Recycling(1024, 1)
    assert [kept.scope(salt) for salt in ("a", "b", "a", "c", "a", "b")] == [0, 1, 0, 1, 0, 1]
    drafter = make_drafter()
    drafter.recycling = kept
    others = [make_request([5, 2, 20], salt, cache_salt=salt) for salt in ("c", "d")]
    for forget in (drafter.reset, lambda: drafter.propose(others)):
        drafter.propose([stepped([1, 2, 10], [], [10, 110, 50, 60, 70], cache_salt="b")])
        [after] = drafter.propose([make_request([5, 2, 20], "b", cache_salt="b")])
        forget()
        [gone] = drafter.propose([make_request([5, 2, 20], "again", cache_salt="b")])
        assert 60 in after.token_ids.tolist()
        assert 60 not in gone.token_ids.tolist()


def has_context(table: NativeRecycled, scope: int, context: Sequence[int]) -> bool:
    """Whether a scope of the compiled table has a context, as its drafts show."""
    job = Job(None, None, None, np.array(context, dtype=np.int32), 0, 8, 1, False)
    [draft] = NativeBackend(BLEND).draft_batch([job._replace(recycled=table, scope=scope)])
    return draft.tree.num_nodes > 0


def write(table: NativeRecycled, scope: int, pairs: Sequence[tuple[int, int]]) -> None:
    backend = NativeBackend(BLEND)
    row = rows_of([list(zip(range(ROW_TOKENS), RATES.tolist(), strict=True))], [], [], [])
    for pair in pairs:
        tokens = np.array([*pair, 0], dtype=np.int32)
        job = Job(None, None, None, tokens, 0, 1, 1, False)._replace(
            recycled=table, scope=scope, rows=row
        )
        backend.draft_batch([job])


def test_a_request_that_gets_no_token_writes_nothing():
    """Its prompt is computed in parts, and drafts were prepared for its batch."""
    table = NativeRecycled(64, 4)
    rows = rows_of([list(zip(range(ROW_TOKENS), RATES.tolist(), strict=True))], [], [], [])
    job = Job(None, None, None, np.array([1, 2, 3], dtype=np.int32), 0, 8, 8, False)
    packed = NativeBackend(BLEND).pack([job._replace(recycled=table, rows=rows, step_row=0)])
    for count, is_written in ((0, False), (1, True)):
        packed.draft((np.full((1, 1), 4), np.array([count])))
        assert has_context(table, 0, [1, 2, 3]) == is_written


def test_no_eviction_tells_of_a_neighbour():
    """A tenant that fills the table sees the same whether another used a pair of tokens."""
    for trial in range(40):  # tables draw what they evict
        seen = []
        for secret in ((1000, 1001), (2000, 2001)):
            table = NativeRecycled(64, 4)
            fill = [(100 + i, 100 + i) for i in range(40)]
            write(table, 0, fill)
            write(table, 1, [secret])
            probes = [*fill, (1000, 1001), (2000, 2001)]
            seen.append([has_context(table, 0, probe) for probe in probes])
        assert seen[0] == seen[1], f"trial {trial}"


def test_no_scope_takes_another_ones_share():
    table = NativeRecycled(90, 3)
    pairs = [(100 + i, 200 + i) for i in range(10)]  # 30 contexts, a third
    write(table, 0, pairs)
    write(table, 1, [(i, i) for i in range(300, 600)])
    write(table, 2, [(i, i) for i in range(600, 900)])
    assert all(has_context(table, 0, pair) for pair in pairs)
    assert not has_context(table, 1, (300, 300))
    assert has_context(table, 1, (599, 599))


TOKENS = st.integers(0, 5)
RATE = st.floats(0, 1, width=32)
ROW = st.lists(TOKENS, unique=True, min_size=3, max_size=3).flatmap(
    lambda tokens: st.lists(RATE, min_size=8, max_size=8).map(
        lambda rates: list(zip([*tokens, *range(10, 15)], sorted(rates)[::-1], strict=True))
    )
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, list[int], Any]:
    """A scope, a prompt, a text and the rows of its last step."""
    nodes = draw(st.lists(st.tuples(TOKENS, st.integers(-1, 3)), max_size=5))
    parents = [min(parent, node - 1) for node, (_, parent) in enumerate(nodes)]
    path: list[int] = []
    if nodes and draw(st.booleans()):
        node = draw(st.integers(0, len(nodes) - 1))
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
    tokens = [token for token, _ in nodes]
    text = [*draw(st.lists(TOKENS, max_size=4)), *(tokens[node] for node in path), draw(TOKENS)]
    listed = [draw(ROW) for _ in range(len(nodes) + 1)]
    scope, prompt = draw(st.integers(0, 2)), draw(st.sampled_from([0, 5, -7]))
    return scope, prompt, text, rows_of(listed, tokens, parents, path)


@given(st.lists(steps(), max_size=12), st.integers(3, 40), st.booleans())
def test_compiled_table_equals_its_twin(observed, max_contexts, chain_only):
    """Tables so small that contexts are evicted, and a scope that is forgotten."""
    trees: list[list[TokenTree]] = []
    for backend, table in (
        (NativeBackend(BLEND, SAMPLED), NativeRecycled(max_contexts, 3)),
        (PythonBackend(BLEND, SAMPLED), RecycledTable(max_contexts, 3)),
    ):
        drafted = []
        for number, (scope, prompt, text, rows) in enumerate(observed):
            if number == 6:
                table.forget(1)
            tokens = np.array(text, dtype=np.int32)
            index: Any = backend.new_index(4)
            job = Job(index, None, None, tokens, len(text), 40, 6, chain_only)
            job = job._replace(recycled=table, scope=scope, rows=rows, prompt=prompt)
            job = job._replace(is_sampled=number % 2 > 0)
            drafted += [draft.tree for draft in backend.draft_batch([job])]
        trees.append(drafted)
    for compiled, readable in itertools.zip_longest(*trees):
        assert by_path(compiled) == by_path(readable)
        assert compiled.token_ids.tolist() == readable.token_ids.tolist()
