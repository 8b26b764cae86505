"""Overrides of Model Runner V2 at the start of an engine, with a stand-in for the runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from tests.unit.hooks.v2_steps import Steps
from vllm_trie.drafts.engine.runners.v2 import RunnerV2Mixin


class Stock:
    """The runner's part."""

    max_num_reqs, decode_query_len, max_num_tokens = 8, 9, 50
    aux_output_connector = None

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.caches: list[bool] = []
        self.model = SimpleNamespace(compute_logits=self.compute_logits)
        self.speculative_config = SimpleNamespace(
            num_speculative_tokens_per_batch_size=[(1, 4, 8), (5, 6, 4), (7, 1 << 20, 0)]
        )

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(states))
        return states.new_zeros(len(states), 7)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        self.compute_logits(hidden_states)

    execute_model_state = None

    def execute_model(self, scheduled: Any) -> None:
        raise RuntimeError("out of memory")

    def sample_tokens(self, grammar_output: Any) -> None:
        assert self.execute_model_state is None  # so vLLM's own returns None

    def _dummy_run(self, num_tokens: int, **options: Any) -> dict[str, Any]:
        return {"num_tokens": num_tokens, **options}

    def initialize_kv_cache(self, config: Any, is_profiling: bool, context: Any) -> None:
        if self.speculator.enable_adaptive_verification:
            raise ValueError("this backend takes one length only")
        self.caches.append(is_profiling)


class Runner(RunnerV2Mixin, Stock):
    """As the workers make it."""


def make_runner(any_length: bool = False) -> Any:
    runner: Any = Runner()
    runner.speculator = SimpleNamespace(enable_adaptive_verification=any_length)
    return runner


def test_memory_profiling_sees_the_logits_of_full_drafts():
    runner = make_runner()
    runner._dummy_sampler_run(torch.zeros(8, 4))
    assert runner.rows == [8, 8 + 4 * 8]  # 4 with full drafts, then 4 more
    runner.max_num_tokens = 30
    runner._dummy_sampler_run(torch.zeros(8, 4))
    assert runner.rows[-1] == 30


def test_graphs_of_one_length_where_a_backend_takes_no_others():
    runner = make_runner(any_length=True)
    runner.initialize_kv_cache(SimpleNamespace(kv_cache_groups=[]))
    assert not runner.speculator.enable_adaptive_verification
    assert runner.caches == [False]


def test_steps_are_profiled_without_context():
    """As `AdaptiveVerificationManager.batches_to_profile` asks for them."""
    made = make_runner()._dummy_run(num_tokens=8, context_len=8192, is_profile=True)
    assert made == {"num_tokens": 8, "is_profile": True}


def test_a_failed_step_has_no_tokens():
    """vLLM then raises what `execute_model` has raised."""
    runner: Any = Runner()
    runner.speculator = Steps()
    scheduled = SimpleNamespace(
        scheduled_new_reqs=[],
        num_scheduled_tokens={},
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=1,
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(scheduled)
    assert runner.sample_tokens(None) is None


@pytest.mark.parametrize(("kind", "allowed"), [("MAMBA2", True), ("MAMBA1", False)])
def test_states_that_vllm_does_not_take_back_are_refused(kind, allowed):
    runner = make_runner()
    state = MambaAttentionBackendEnum[kind]
    spec = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,), mamba_type=state)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0.mixer"])
    config = SimpleNamespace(kv_cache_groups=[group])
    if allowed:
        runner.initialize_kv_cache(config)
        assert runner.caches == [False]
    else:
        with pytest.raises(ValueError, match=r"layers.0.mixer are of kind MAMBA1, whose state"):
            runner.initialize_kv_cache(config)
