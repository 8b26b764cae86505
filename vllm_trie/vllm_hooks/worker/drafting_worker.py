"""What the CPU worker and the GPU worker do alike for drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_trie.vllm_hooks.worker.runners.v1_adapter import V1Adapter
from vllm_trie.vllm_hooks.worker.runners.v2_adapter import V2Adapter

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


class DraftingWorkerMixin(_Worker):
    """Overrides of vLLM's workers around the runner's adapter."""

    @property
    def adapter(self) -> V1Adapter | V2Adapter | None:
        """The runner's; none in pipeline stages that do not sample, and after a failed start."""
        found: V1Adapter | V2Adapter | None
        found = getattr(getattr(self, "model_runner", None), "adapter", None)
        return found

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self.adapter is not None:
            self.adapter.calibrate()
        return times

    def shutdown(self) -> None:
        if self.adapter is not None:
            self.adapter.trees.close()
        super().shutdown()
