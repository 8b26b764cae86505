"""vLLM's GPU worker and its Model Runner V2 with the plugin's speculation.

Drafts are chains there unless the user asks for trees, and checks at the start try both.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.runners.v2 import RunnerV2Mixin
from vllm_trie.drafts.engine.workers.drafting_worker import DraftingWorkerMixin
from vllm_trie.extras import loaded
from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger.record import TESTED, TREE_DRAFTS, Symbols
from vllm_trie.hooks.start.runner_choice import runner_scopes

GPU_BACKEND_CLASS = "vllm_trie.drafts.engine.attention.cuda.TreeTritonAttentionBackend"

_worker = Symbols("v1.worker.gpu_worker:Worker.", TREE_DRAFTS, platform="cuda")


@Symbols("v1.worker.gpu.model_runner:", TREE_DRAFTS, platform="cuda").subclasses(
    "GPUModelRunner", "Model Runner V2 that drafts", "vllm_config device", scope="v2_runner"
)
class DraftingGPUModelRunnerV2(RunnerV2Mixin, GPUModelRunner):
    """Model Runner V2 on a GPU, with drafts."""


class TreeGPUWorker(DraftingWorkerMixin, Worker):
    """The GPU worker for the plugin's methods."""

    checks_start = True

    model_runner: DraftingGPUModelRunnerV2  # type: ignore[assignment]

    @_worker.overrides("registers the attention backend, makes the runner with trees")
    def init_device(self) -> None:
        verification = config.verification(self.vllm_config)
        if verification == "tree":
            register_backend(AttentionBackendEnum.CUSTOM, GPU_BACKEND_CLASS)
            self.vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
            # An engine that this process ran before may have left another backend in the cache.
            selector._cached_get_attn_backend.cache_clear()
        with ledger.installed(*runner_scopes(self.vllm_config, verification)):
            super().init_device()

    @_worker.overrides("checks tree attention on the device before serving", until=TESTED)
    def compile_or_warm_up_model(self) -> Any:
        if config.verification(self.vllm_config) == "tree":
            # First, as vLLM watches for kernels that are compiled after its own warm-up.
            for check_device in loaded("checks", "attention"):
                check_device(self.model_runner)
        return super().compile_or_warm_up_model()

    @_worker.overrides("measures step costs and checks drafts before vLLM watches for kernels")
    def _maybe_activate_jit_monitor(self) -> None:
        self.start_drafting()
        super()._maybe_activate_jit_monitor()
