"""vLLM's GPU worker with the tree mixin on its model runner.

Not yet run on a GPU: :mod:`vllm_trie.vllm_hooks.setup.support` refuses GPUs unless the user
allows them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_trie.vllm_hooks.worker.calibration import calibrate_step_cost
from vllm_trie.vllm_hooks.worker.gpu_check import check_device
from vllm_trie.vllm_hooks.worker.runner_v1 import add_trees
from vllm_trie.vllm_hooks.worker.verification.sampling import argmax_of_rows

GPU_BACKEND_CLASS = "vllm_trie.vllm_hooks.worker.attention.cuda.TreeTritonAttentionBackend"


class TreeGPUWorker(Worker):
    """The GPU worker for tree speculation."""

    def init_device(self) -> None:
        register_backend(AttentionBackendEnum.CUSTOM, GPU_BACKEND_CLASS)
        self.vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
        # An engine that this process ran before may have left another backend in the cache.
        selector._cached_get_attn_backend.cache_clear()
        super().init_device()
        add_trees(self.model_runner)
        reserve_for_verification(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        # First, as vLLM watches for kernels that are compiled after its own warm-up.
        check_device(self.model_runner)
        times = super().compile_or_warm_up_model()
        calibrate_step_cost(self.model_runner)
        return times


def reserve_for_verification(runner: Any) -> None:
    """Let vLLM's measurement of memory see what verifying trees takes.

    vLLM gives all memory that its profiling left to the KV cache, and profiles with two rows of
    logits for each request. A step with trees has one row for each node too.

    Args:
        runner: of this worker, with the mixin; its ``_dummy_sampler_run`` is wrapped.
    """
    stock = runner._dummy_sampler_run

    def dummy_sampler_run(hidden_states: torch.Tensor) -> torch.Tensor:
        sampled = stock(hidden_states)
        of_requests = runner.max_num_reqs * (1 + runner.num_spec_tokens)
        rows = min(runner.max_num_tokens, of_requests)
        states = hidden_states.new_zeros(rows, hidden_states.shape[1])
        with torch.inference_mode():
            argmax_of_rows(runner.sampler, runner.model.compute_logits(states))
        return sampled

    runner._dummy_sampler_run = dummy_sampler_run
