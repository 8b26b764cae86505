"""Every attribute that vLLM's Model Runner V2 reads off an object of the plugin's exists."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm

from tests.unit.hooks.test_v2_adapter import make_sampler
from vllm_trie.drafts.engine.runners import v2 as runner_v2
from vllm_trie.drafts.engine.runners.v2 import DraftedOnly
from vllm_trie.drafts.engine.runners.v2_trees import TreeSampler

WORKER = Path(vllm.__file__).parent / "v1" / "worker"
OF_TRAINED = {"dcp_size", "draft_attn_layer_names", "load_model", "model"}
OF_TRAINED |= {"observe_verification", "pcp_manager", "set_attn", "set_eplb_state"}
"""Read behind an ``isinstance`` or where another test has left vLLM's own speculators alone."""


def attributes_read(owner: str) -> set[str]:
    files = [path for path in (WORKER / "gpu").rglob("*.py") if "spec_decode" not in path.parts]
    texts = [path.read_text() for path in (WORKER / "gpu_worker.py", *files)]
    return {name for text in texts for name in re.findall(rf"\b{owner}\.(\w+)", text)}


def test_rejection_samplers():
    read = attributes_read("rejection_sampler")
    assert "enable_adaptive_verification" in read
    for kind in (DraftedOnly, TreeSampler):
        sampler = make_sampler(kind, SimpleNamespace(num_drafted=torch.zeros(1)))
        assert [name for name in read if not hasattr(sampler, name)] == []


def test_the_speculator(monkeypatch):
    read = attributes_read("speculator") - OF_TRAINED
    assert {"propose", "draft_logits", "num_query_per_req", "draft_token_confidence_probs"} <= read
    monkeypatch.setattr(runner_v2, "_make_adapter", lambda *arguments: None)
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    states: Any = SimpleNamespace(max_num_reqs=2, num_speculative_steps=4)
    speculator = runner_v2.HostSpeculator(config, torch.device("cpu"), states)
    assert [name for name in read if not hasattr(speculator, name)] == []
