"""Allow-lists and deny-lists against brute force: every item and every path of the catalogue."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.extras.items.unit.catalogues import random_items, selected_items, trie_of
from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.selection import Rules, SelectedTrie, select
from vllm_trie.extras.items.sources import read_items
from vllm_trie.extras.items.trie_file import open_items

VOCAB = 6


def walk(view) -> set[tuple[int, ...]]:
    """Return the items that a walk reaches, and see that no way is a dead end."""
    items = set()
    paths, nodes = [()], np.array([0], dtype=np.int32)
    while len(nodes):
        ends, continues = view.is_terminal(nodes), view.has_children(nodes)
        assert (ends | continues)[1:].all() or nodes[0] == 0
        items |= {path for path, end in zip(paths, ends, strict=True) if end}
        children = view.children(nodes)
        assert set(children.parents.tolist()) == set(np.flatnonzero(continues).tolist())
        if nodes[0] != 0:
            assert (ends | continues).all()
        paths = [
            (*paths[parent], token)
            for parent, token in zip(
                children.parents.tolist(), view.tokens[children.nodes].tolist(), strict=True
            )
        ]
        nodes = children.nodes
    return items


@pytest.fixture(scope="module")
def catalogues(tmp_path_factory):
    folder = tmp_path_factory.mktemp("catalogues")
    result = []
    for number, (count, lengths) in enumerate([(3, (1, 2)), (60, (1, 4)), (400, (2, 5))]):
        items = random_items(number, count, VOCAB, lengths)
        # Several items may have one id.
        items = {tokens: value % 350 for tokens, value in items.items()}
        text = number == 1
        trie = trie_of(folder / f"{number}.trie", items, text_ids=text)
        ids = {tokens: f"item {value}" if text else value for tokens, value in items.items()}
        result.append((trie, items, ids))
    return result


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_equals_brute_force(catalogues, data):
    trie, items, ids_of = catalogues[data.draw(st.integers(0, 2))]
    some_ids = st.lists(st.sampled_from([*ids_of.values()]), max_size=30)
    prefix = st.one_of(
        st.lists(st.integers(0, VOCAB), min_size=1, max_size=5),
        st.builds(
            lambda tokens, length: list(tokens[: max(1, length)]),
            st.sampled_from([*items]), st.integers(1, 5),
        ),
    )  # fmt: skip
    prefixes = st.lists(prefix, max_size=8)
    rules = Rules(
        allow_items=data.draw(st.none() | some_ids),
        allow_prefixes=data.draw(st.none() | prefixes),
        deny_items=data.draw(st.just([]) | some_ids | st.just([*ids_of.values()])),
        deny_prefixes=data.draw(st.just([]) | prefixes),
    )
    expected = selected_items(items, ids_of, rules)
    view = SelectedTrie(trie, select(trie, rules))
    assert walk(view) == expected.keys()


def test_an_id_that_the_catalogue_lacks_matches_nothing(catalogues):
    trie, items, _ = catalogues[0]
    assert walk(SelectedTrie(trie, select(trie, Rules(deny_items=[10**9])))) == items.keys()
    assert walk(SelectedTrie(trie, select(trie, Rules(allow_items=[10**9])))) == set()
    assert walk(SelectedTrie(trie, select(trie, Rules(allow_prefixes=[])))) == set()


def test_a_long_deny_list_of_long_items_costs_little(tmp_path):
    """All requests wait while it is looked up, and it goes to the worker with each step."""
    seconds = []
    for length in (16, 128):
        array = np.random.default_rng(0).integers(0, 1000, (5000, length))
        np.save(tmp_path / "items.npy", array)
        build_items(tmp_path / "items.trie", read_items(tmp_path / "items.npy"))
        trie = open_items(tmp_path / "items.trie")
        begin = time.process_time()
        valid_part = select(trie, Rules(deny_items=[*range(4096)]))
        seconds.append(time.process_time() - begin)
        assert len(valid_part.nodes) < 2 * 4096
    assert seconds[1] < 32 * seconds[0]  # of 8 times as many tokens; squared, it is 64 times
