"""vLLM's CPU worker and its model runners with the plugin's speculation."""

from __future__ import annotations

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu import model_runner as cpu_model_runner_v2
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_trie.vllm_hooks import ledger
from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.setup.runner_choice import runner_scopes
from vllm_trie.vllm_hooks.worker.drafting_worker import DraftingWorkerMixin
from vllm_trie.vllm_hooks.worker.runners.runner_v1 import ChainRunnerMixin, TreeRunnerMixin
from vllm_trie.vllm_hooks.worker.runners.runner_v2 import RunnerV2Mixin

CPU_BACKEND_CLASS = "vllm_trie.vllm_hooks.worker.attention.cpu.TreeCPUAttentionBackend"


def choose_attention(for_trees: bool) -> None:
    """Replace vLLM's CPU attention by tree attention, or put it back.

    An engine that this process ran before may have left the other one in place.
    """
    if for_trees:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND_CLASS)
    else:
        AttentionBackendEnum.CPU_ATTN.clear_override()


class ChainCPUModelRunner(ChainRunnerMixin, CPUModelRunner):
    """The CPU model runner with drafts that vLLM verifies."""


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """The CPU model runner with draft trees."""


class DraftingCPUModelRunnerV2(RunnerV2Mixin, cpu_model_runner_v2.CPUModelRunner):
    """Model Runner V2 on a CPU, with drafts that vLLM verifies."""


class TreeCPUWorker(DraftingWorkerMixin, cpu_worker.CPUWorker):
    """The CPU worker for the plugin's methods."""

    checks_start = False

    model_runner: ChainCPUModelRunner

    def init_device(self) -> None:
        verification = config.verification(self.vllm_config)
        choose_attention(for_trees=verification == "tree")
        selector._cached_get_attn_backend.cache_clear()
        with ledger.installed(*runner_scopes(self.vllm_config, verification)):
            super().init_device()
