"""Which KV moves where after a step, and that the move brings the accepted path's KV into order."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import token_trees
from vllm_trie.attention import TreeRow, split_cache
from vllm_trie.drafts.engine.verification.compaction import (
    CacheGroup,
    cache_groups,
    compact,
    moved_tokens,
    moves_of,
)
from vllm_trie.tree import TokenTree

BLOCK, HEADS, HEAD_SIZE = 4, 2, 3


def path_to(tree: TokenTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, TokenTree, list[int]]], list[int]]:
    """Batch rows (committed tokens of the step, tree, accepted path), and the rows' slots."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        tree = draw(token_trees(max_nodes=8))
        tip = draw(st.integers(-1, tree.num_nodes - 1))
        rows.append((draw(st.integers(1, 3)), tree, path_to(tree, tip)))
    num_tokens = sum(committed + tree.num_nodes for committed, tree, _ in rows)
    slots = draw(st.permutations(range(num_tokens + 5)))[:num_tokens]
    return rows, slots


@given(steps())
def test_accepted_nodes_end_in_the_slots_behind_the_committed_tokens(step):
    batch, slots = step
    rows, accepted, start = [], [], 0
    for index, (committed, tree, path) in enumerate(batch):
        accepted.append(path)
        num_queries = committed + tree.num_nodes
        if tree.num_nodes:
            rows.append(TreeRow(index, start, num_queries, tree.num_nodes, 100 + num_queries))
        start += num_queries
    num_blocks = -(-(max(slots) + 1) // BLOCK)
    cache = torch.randn(num_blocks, HEADS, BLOCK, 2 * HEAD_SIZE)
    before = cache.clone()
    mapping = torch.tensor(slots)
    moves = torch.from_numpy(moved_tokens(rows, accepted))
    assert len(moves[1].unique()) == len(moves[1])
    compact([CacheGroup(0, (cache,), moves_of("vec"))], [mapping], *moves)

    def read(cache: torch.Tensor, row: int) -> torch.Tensor:
        keys, values = split_cache(cache)
        block, offset = divmod(slots[row], BLOCK)
        return torch.cat([keys[block, :, :, offset], values[block, :, offset]])

    overwritten, walked = set(), [*range(start)]
    for row in rows:
        first = row.query_start + row.num_queries - row.num_nodes
        for place, node in enumerate(accepted[row.batch_index]):
            assert torch.equal(read(cache, first + place), read(before, first + node))
            overwritten.add(first + place)
            walked[first + place] = first + node
    for row in set(range(start)) - overwritten:
        assert torch.equal(read(cache, row), read(before, row))
    # A device's walk names a token for each: those of the accepted path, then the token itself.
    moves = torch.tensor([walked, [*range(start)]])
    compact([CacheGroup(0, (before,), moves_of("vec"))], [mapping], *moves)
    assert torch.equal(before, cache)


def test_caches_that_layers_of_a_group_share_are_moved_once():
    private, shared = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    layers = {
        "a": SimpleNamespace(kv_cache=private),
        "a of another group": SimpleNamespace(kv_cache=private),
        "b": SimpleNamespace(kv_cache=shared),
        "c": SimpleNamespace(kv_cache=shared),
        "of another kernel": SimpleNamespace(kv_cache=torch.zeros(1, 1, 4, 2), isa="amx"),
        "of a drafter": SimpleNamespace(kv_cache=torch.zeros(1, 1, 4, 2), is_draft_layer=True),
    }
    groups = cache_groups(
        SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=["of a drafter"]),
                SimpleNamespace(layer_names=["a"]),
                SimpleNamespace(layer_names=[*layers][:0:-1]),
            ]
        ),
        layers,
    )
    assert [group.group_id for group in groups] == [1, 2, 2]
    assert [len(group.caches) for group in groups] == [1, 1, 2]
