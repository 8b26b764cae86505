"""vLLM's CPU worker and its model runners with the plugin's speculation."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention import selector
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu import model_runner as cpu_model_runner_v2
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.attention.cpu import choose_attention
from vllm_trie.drafts.engine.runners.v1 import ChainRunnerMixin, TreeRunnerMixin
from vllm_trie.drafts.engine.runners.v2 import RunnerV2Mixin
from vllm_trie.drafts.engine.workers.drafting_worker import DraftingWorkerMixin
from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger.record import TREE_DRAFTS, Symbols
from vllm_trie.hooks.start.runner_choice import runner_scopes

logger = init_logger(f"vllm.{__name__}")

_INSTRUCTIONS: dict[object, str] = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
"""Instructions without which a linear layer of vLLM takes twice as long for two rows as for one."""

_worker = Symbols("v1.worker.cpu_worker:", TREE_DRAFTS, platform="cpu")
_PARAMETERS = "vllm_config device"


@_worker.subclasses(
    "CPUModelRunner", "the same, where vLLM verifies the drafts", _PARAMETERS, scope="chain_runner"
)
class ChainCPUModelRunner(ChainRunnerMixin, CPUModelRunner):
    """The CPU model runner with drafts that vLLM verifies."""


@_worker.subclasses(
    "CPUModelRunner",
    "the class that the worker makes its runner of",
    _PARAMETERS,
    scope="tree_runner",
)
class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """The CPU model runner with draft trees."""


@Symbols("v1.worker.cpu.model_runner:", TREE_DRAFTS, platform="cpu").subclasses(
    "CPUModelRunner", "Model Runner V2 that drafts", _PARAMETERS, scope="v2_runner"
)
class DraftingCPUModelRunnerV2(RunnerV2Mixin, cpu_model_runner_v2.CPUModelRunner):
    """Model Runner V2 on a CPU, with drafts."""


class TreeCPUWorker(DraftingWorkerMixin, cpu_worker.CPUWorker):
    """The CPU worker for the plugin's methods."""

    checks_start = False

    model_runner: ChainCPUModelRunner

    @Symbols("v1.worker.cpu_worker:CPUWorker.", TREE_DRAFTS, platform="cpu").overrides(
        "registers the attention backend, makes the runner with trees"
    )
    def init_device(self) -> None:
        verification = config.verification(self.vllm_config)
        choose_attention(for_trees=verification == "tree")
        selector._cached_get_attn_backend.cache_clear()
        with ledger.installed(*runner_scopes(self.vllm_config, verification)):
            super().init_device()
        warn_of_slow_dtype(self.model_config.dtype)

    @Symbols("v1.worker.cpu_worker:CPUWorker.", TREE_DRAFTS, platform="cpu").overrides(
        "measures step costs once the model is ready"
    )
    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.start_drafting()
        return times


def warn_of_slow_dtype(dtype: object) -> None:
    """Warn if each further token of a step costs a whole row of emulated arithmetic."""
    needs = _INSTRUCTIONS.get(dtype)
    capabilities = torch.cpu.get_capabilities()
    if needs and capabilities["architecture"] == "x86_64" and not capabilities[needs]:
        logger.warning(
            "dtype %s on a CPU without %s: a step takes longer with each token that it verifies; "
            "set --dtype float32, which is faster with drafts",
            str(dtype).removeprefix("torch."),
            needs,
        )
