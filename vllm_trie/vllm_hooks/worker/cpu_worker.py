"""Worker classes: vLLM's own, with the tree mixin on their model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_trie.vllm_hooks.worker.calibration import calibrate_step_cost
from vllm_trie.vllm_hooks.worker.runner_v1 import add_trees

CPU_BACKEND_CLASS = "vllm_trie.vllm_hooks.worker.attention.cpu.TreeCPUAttentionBackend"


class TreeCPUWorker(CPUWorker):
    """The CPU worker for tree speculation."""

    def init_device(self) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND_CLASS)
        # An engine that this process ran before may have left the stock backend in the cache.
        selector._cached_get_attn_backend.cache_clear()
        super().init_device()
        add_trees(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        calibrate_step_cost(self.model_runner)
        return times
