"""Places of trees in a step of Model Runner V2, and the move of the accepted nodes' KV."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from tests.unit.drafters.support import VOCAB, make_context
from tests.unit.hooks.test_compaction import path_to
from tests.unit.tree.strategies import token_trees
from vllm_trie.drafters import Drafter, DrafterOptions
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter
from vllm_trie.vllm_hooks.worker.runners import v2_adapter, v2_trees
from vllm_trie.vllm_hooks.worker.runners.v2_trees import V2TreeAdapter
from vllm_trie.vllm_hooks.worker.verification.compaction import (
    CacheGroup,
    compact,
    compact_on_device,
)
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

NUM_NODES = 4


class Idle(Drafter):
    name = "idle"
    Options = DrafterOptions

    def __init__(self) -> None:
        super().__init__(DrafterOptions(), make_context())

    def propose(self, requests: Any) -> list[TokenTree]:
        return [TokenTree.empty() for _ in requests]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> V2TreeAdapter:
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: None)
    guard = GuardedDrafter(Idle(), VOCAB, 30.0, logging.getLogger("tests.v2"))
    states: Any = SimpleNamespace(max_num_reqs=8, num_speculative_steps=NUM_NODES)
    return V2TreeAdapter(TreeVerifier(guard), states, torch.device("cpu"))


def test_nodes_get_the_positions_of_their_depth_and_fillers_are_never_accepted(adapter) -> None:
    """A tree of three nodes, a prefill in parts, a request without a draft, a chain."""
    trees = [
        TokenTree.from_lists([11, 12, 13], [-1, -1, 0]),
        TokenTree.empty(),
        TokenTree.empty(),
        TokenTree.from_lists([21, 22], [-1, 0]),
    ]
    places = np.array([NUM_NODES, 0, NUM_NODES, NUM_NODES])
    scheduled = np.array([1, 5, 1, 1]) + places
    lengths = {"tree": 30, "prefill": 50, "plain": 60, "chain": 40}
    adapter.trees.step_trees = trees
    adapter._requests = {i: SimpleNamespace(num_tokens=n) for i, n in lengths.items()}
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    flat = torch.cat([torch.arange(n) + 100 for n in scheduled])
    batch: Any = SimpleNamespace(
        num_reqs=4,
        req_ids=[*lengths],
        num_draft_tokens=int(places.sum()),
        num_draft_tokens_per_req=places,
        num_scheduled_tokens=scheduled,
        cu_num_logits_np=np.concatenate([[0], np.cumsum(places + 1)]).astype(np.int32),
        query_start_loc_np=starts,
        positions=flat.clone(),
        input_ids=torch.zeros(int(starts[-1]), dtype=torch.int32),
    )
    adapter.place(batch, torch.zeros(1, int(starts[-1])))
    # The last committed token, at 29, keeps what vLLM set; the filler is below the last node.
    assert batch.positions[:5].tolist() == [100, 30, 30, 31, 32]
    assert torch.equal(batch.positions[5:], flat[5:])
    tree_batch = adapter.trees.tree_batch
    assert tree_batch is not None
    (row,), (mask,) = tree_batch.rows, tree_batch.masks
    assert row == (0, 0, 5, NUM_NODES, 29 + 5, 0)
    assert not tree_batch.covers_batch
    assert mask[1:4, -NUM_NODES:].tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [True, False, True, False],
    ]
    tokens, parents = (rows.tolist() for rows in adapter.draft_rows)
    assert tokens == [0, 11, 12, 13, 0, *[0] * 6, 0, 21, 22, 0, 0]
    assert parents == [-1, 0, 0, 1, -1, *[-1] * 6, -1, 0, 1, -1, -1]


def test_rows_of_any_number_are_aligned(adapter) -> None:
    """Triton compiles a kernel anew for a pointer that is no multiple of 16 bytes."""
    adapter.trees.step_trees = [TokenTree.from_lists([11, 12], [-1, -1])]
    adapter._requests = {"a": SimpleNamespace(num_tokens=30)}
    batch: Any = SimpleNamespace(
        num_reqs=1,
        req_ids=["a"],
        num_draft_tokens=2,
        num_draft_tokens_per_req=np.array([2]),
        num_scheduled_tokens=np.array([3]),
        cu_num_logits_np=np.array([0, 3], dtype=np.int32),
        query_start_loc_np=np.array([0, 3], dtype=np.int32),
        positions=torch.arange(3) + 29,
        input_ids=torch.zeros(3, dtype=torch.int32),
    )
    adapter.place(batch, torch.zeros(1, 3))
    assert [len(rows) for rows in adapter.draft_rows] == [3, 3]
    offsets = {rows.storage_offset() * rows.element_size() % 16 for rows in adapter.draft_rows}
    assert offsets == {0}


def test_the_output_is_copied_before_kv_moves(adapter, monkeypatch) -> None:
    done: list[str] = []
    for name in ("async_copy_to_np", "compact_on_device"):
        for module in (v2_adapter, v2_trees):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *arguments, name=name: done.append(name))
    adapter._copied = SimpleNamespace(record=lambda: None)
    adapter.runner = SimpleNamespace(use_pp=False)
    adapter.trees.tree_batch = object()
    adapter.keep_path(torch.zeros(1), torch.zeros(1))
    adapter._slot_mappings = torch.zeros(1, 1)
    adapter.keep_sampled(torch.zeros(1, 2), torch.zeros(1))
    assert "compact_on_device" not in done  # vLLM starts its copy of the output now
    batch: Any = SimpleNamespace(num_reqs=1, req_ids=["a"], idx_mapping=torch.zeros(1))
    adapter.propose(batch, torch.zeros(1, 2), NUM_NODES)
    assert done[-1] == "compact_on_device"


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"bad_words": ["a"]},
    ],
)
def test_what_reads_drafts_as_a_chain_gets_chains(adapter, params: dict[str, Any]) -> None:
    assert not adapter._needs_chain(SamplingParams(temperature=0.7, seed=1, min_tokens=2))
    assert adapter._needs_chain(SamplingParams(**params))
    adapter._processors_read_chains = True
    assert adapter._needs_chain(SamplingParams())


@given(st.data())
def test_the_device_moves_what_the_host_would(data: st.DataObject) -> None:
    """One group; the walk's rows hold the accepted path, then themselves."""
    trees = data.draw(st.lists(token_trees(max_nodes=6), min_size=1, max_size=3))
    tokens, rows, sources, targets = [], [], [], []
    for tree in trees:
        path = path_to(tree, data.draw(st.integers(-1, tree.num_nodes - 1)))
        first, token = len(rows), 2 + len(tokens)
        moved = [node + 1 for node in path]
        rows += [first + row for row in [0, *moved, *range(len(path) + 1, tree.num_nodes + 1)]]
        sources += [token + row for row in moved]
        targets += [token + 1 + place for place in range(len(path))]
        tokens += range(token, token + tree.num_nodes + 1)
    slots = torch.tensor(data.draw(st.permutations(range(2 + len(tokens)))))
    caches = [torch.randn(-(-len(slots) // 4), 2, 4, 6) for _ in range(2)]
    expected, on_device = ([cache.clone() for cache in caches] for _ in range(2))
    compact([CacheGroup(0, tuple(expected))], [slots], sources, targets)
    groups = [CacheGroup(0, tuple(on_device))]
    compact_on_device(groups, [slots], torch.tensor(tokens), torch.tensor(rows))
    assert all(map(torch.equal, expected, on_device))
