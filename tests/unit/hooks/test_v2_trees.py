"""Places of trees in a step of Model Runner V2, and what samples them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.unit.hooks.v2_steps import Steps
from vllm_trie.drafts.engine.runners.v2_trees import TreeSampler, V2TreeAdapter
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.tree import TokenTree


@pytest.fixture
def adapter():
    return Steps(adapter_class=V2TreeAdapter).adapter


def test_rows_of_any_number_are_aligned(adapter):
    """Triton compiles a kernel anew for a pointer that is no multiple of 16 bytes."""
    step = TreeStep(["a"], [TokenTree.from_lists([11, 12], [-1, -1])])
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
    rows = adapter.place(step, batch)
    assert [len(part) for part in rows] == [3, 3]
    offsets = {part.storage_offset() * part.element_size() % 16 for part in rows}
    assert offsets == {0}


def test_positions_in_several_dimensions_follow_depths_and_are_taken_back(adapter):
    """M-RoPE has its own. A trained drafter reads accepted nodes in a row, the others anywhere."""
    step = adapter.verifier.step = TreeStep(["a"], [TokenTree.from_lists([11, 12], [-1, -1])])
    step.places = torch.tensor([[2], [-1]])  # the second node is a sibling
    step.path = torch.arange(3), torch.tensor([0, 2, 1])
    positions = torch.tensor([30, 31, 31])

    def prepared() -> list[list[int]]:
        inputs = adapter._prepare_inputs(lambda: {"positions": torch.arange(30, 33).repeat(3, 1)})
        return inputs["positions"].tolist()

    assert prepared() == [[30, 31, 32]] * 3  # of a dummy run
    adapter.waits_for = "masks"
    assert prepared() == [[30, 31, 31]] * 3
    batch: Any = SimpleNamespace(positions=positions, input_ids=torch.tensor([9, 11, 12]))
    states = torch.tensor([0.0, 1.0, 2.0])
    adapter.flatten(batch, {}, [states])
    assert batch.positions.tolist() == [30, 31, 32]
    assert batch.input_ids[:2].tolist() == [9, 12]
    assert states[:2].tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"bad_words": ["a"]},
    ],
)
def test_what_reads_drafts_as_a_chain_gets_chains(adapter, params):
    assert not adapter._needs_chain(SamplingParams(temperature=0.7, seed=1, min_tokens=2))
    assert adapter._needs_chain(SamplingParams(**params))
    adapter._processors_read_chains = True
    assert adapter._needs_chain(SamplingParams())


@pytest.mark.parametrize("dimensions", [None, (1, 0)])
def test_the_sampler_is_told_whether_its_logits_become_logprobs(dimensions):
    """vLLM's fused sampler returns logits before top-k and top-p."""
    calls = []

    def sample(logits: torch.Tensor, *arguments: Any) -> Any:
        calls.append(arguments[-1])
        return torch.zeros(len(logits)), logits

    sampler = object.__new__(TreeSampler)
    sampler.sampler = SimpleNamespace(
        sample=sample,
        logprobs_mode="processed_logprobs",
        get_logprobs_dims=lambda indices: dimensions,
    )
    row = torch.zeros(1, dtype=torch.int64)
    names = "positions logits_indices expanded_idx_mapping idx_mapping expanded_local_pos"
    batch = SimpleNamespace(
        **dict.fromkeys(names.split(), row),
        idx_mapping_np=row.numpy(),
        cu_num_logits_np=np.array([0, 1]),
        seq_lens_cpu_upper_bound=row,
    )
    sampler._sample(torch.zeros(1, 9), batch, row)
    assert calls == [dimensions is not None]
