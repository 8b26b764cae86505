"""vLLM's CPU worker and model runner with tree speculation."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_trie.vllm_hooks.worker.replaced_class import replaced_class
from vllm_trie.vllm_hooks.worker.runner_v1 import TreeRunnerMixin

CPU_BACKEND_CLASS = "vllm_trie.vllm_hooks.worker.attention.cpu.TreeCPUAttentionBackend"


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """The CPU model runner with tree speculation."""


class TreeCPUWorker(cpu_worker.CPUWorker):
    """The CPU worker for tree speculation."""

    model_runner: TreeCPUModelRunner

    def init_device(self) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND_CLASS)
        # An engine that this process ran before may have left the stock backend in the cache.
        selector._cached_get_attn_backend.cache_clear()
        with replaced_class(cpu_worker, "CPUModelRunner", TreeCPUModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.adapter.calibrate()
        return times
