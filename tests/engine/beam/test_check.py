"""``vllm-trie beam check``: passes what works, and finds KV that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.worker import gpu_model_runner

from vllm_trie.beam import Candidates
from vllm_trie.check.beams import BeamCheck, check
from vllm_trie.vllm_hooks.scheduler import group


def small_check(llm: Any) -> BeamCheck:
    return check(llm, widths=(2, 4), max_tokens=20)


@pytest.fixture
def llm(engine) -> Any:
    return engine(block_size=32, max_model_len=512, max_num_seqs=16)


def test_what_works_passes(llm):
    found = small_check(llm)
    assert found.passed
    assert found.num_hypotheses == 18
    assert found.num_pairs > 5
    assert found.found < 1e-4


def test_forks_without_their_copies_are_found(llm, monkeypatch):
    """The worker does not copy the tail block: rows attend to what was there before."""
    monkeypatch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", lambda *arguments: None)
    found = small_check(llm)
    llm.reset_prefix_cache()
    assert not found.passed
    assert found.found > found.allowed
    assert found.ordinary < 1e-4


def test_log_probabilities_of_another_row_are_found(llm, monkeypatch):
    stock = group._merged

    def rolled(parts):
        rows, *values = stock(parts)[:3]
        return Candidates(rows, *(found[::-1] for found in values))

    monkeypatch.setattr(group, "_merged", rolled)
    assert not small_check(llm).passed
