"""Every attribute that vLLM's Model Runner V2 reads off an object of the plugin's exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from vllm_trie.vllm_hooks.worker.runners import v2 as runner_v2
from vllm_trie.vllm_hooks.worker.runners.v2 import DraftedOnly
from vllm_trie.vllm_hooks.worker.runners.v2_trees import TreeSampler

WORKER = Path(vllm.__file__).parent / "v1" / "worker"
TRAINED = "DraftModelSpeculator"
BEHIND_ANOTHER_TEST = {"model", "set_eplb_state"}
"""Read where another test has left all speculators but those with a model."""


class Reads(ast.NodeVisitor):
    """Collects the attributes that are read off an attribute or a variable of a name.

    What only vLLM's own speculators have is read behind an ``isinstance``, and left out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.attributes: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value
        name = getattr(owner, "attr", getattr(owner, "id", None))
        if name == self.name and isinstance(node.ctx, ast.Load):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        guarded = _asks_for_trained(node.test) and not isinstance(node.test, ast.UnaryOp)
        for statement in (*(() if guarded else node.body), *node.orelse):
            self.visit(statement)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self.visit(value)
            if isinstance(node.op, ast.And) and _asks_for_trained(value):
                break


def _asks_for_trained(test: ast.expr) -> bool:
    return "isinstance" in ast.dump(test) and TRAINED in ast.dump(test)


def files() -> Iterator[Path]:
    yield WORKER / "gpu_worker.py"
    yield from (path for path in (WORKER / "gpu").rglob("*.py") if "spec_decode" not in path.parts)


def attributes_read(name: str) -> set[str]:
    reads = Reads(name)
    for path in files():
        reads.visit(ast.parse(path.read_text()))
    return reads.attributes


@pytest.fixture(scope="module")
def stock() -> Any:
    return SimpleNamespace(sampler=None, watermark_key=None)


@pytest.fixture(scope="module")
def spec_config() -> Any:
    return SimpleNamespace(
        num_speculative_tokens=4,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
        fly_entropy_threshold=0.3,  # this and the next since vLLM 0.33
        fly_entropy_top_k=3,
    )


def test_rejection_samplers(stock, spec_config) -> None:
    read = attributes_read("rejection_sampler")
    assert "enable_adaptive_verification" in read
    adapter: Any = SimpleNamespace(num_drafted=torch.zeros(1))
    for sampler in (
        DraftedOnly(stock, spec_config, adapter),
        TreeSampler(stock, spec_config, adapter),
    ):
        assert [name for name in read if not hasattr(sampler, name)] == []


def test_the_speculator(monkeypatch) -> None:
    read = attributes_read("speculator") - BEHIND_ANOTHER_TEST
    assert {"propose", "draft_logits", "num_query_per_req", "draft_token_confidence_probs"} <= read
    monkeypatch.setattr(runner_v2, "_make_adapter", lambda *arguments: None)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True)
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    states: Any = SimpleNamespace(max_num_reqs=2, num_speculative_steps=4)
    speculator = runner_v2.HostSpeculator(config, torch.device("cpu"), states)
    assert [name for name in read if not hasattr(speculator, name)] == []
