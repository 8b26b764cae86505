"""What the CPU worker and the GPU worker do alike for drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_trie.drafts.engine.runners.v1 import V1Speculation
from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter
from vllm_trie.extras import loaded
from vllm_trie.hooks.ledger.record import TREE_DRAFTS, Symbols

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


class DraftingWorkerMixin(_Worker):
    """Overrides of vLLM's workers around the runner's adapter."""

    @property
    def adapter(self) -> V1Speculation | V2Adapter | None:
        """The runner's; none in pipeline stages that do not sample, and after a failed start."""
        return getattr(getattr(self, "model_runner", None), "adapter", None)

    checks_start: ClassVar[bool]
    """Whether drafts must prove themselves before the engine serves with them."""

    def start_drafting(self) -> None:
        """Measure step costs once the model is ready, then draft, if the check does not forbid
        it."""
        if self.adapter is not None:
            self.adapter.warm_up()
        if isinstance(self.adapter, V2Adapter):
            self._begin_drafting(self.adapter)

    def reset_drafts(self) -> None:
        """Forget what ended requests left to draft from; for `collective_rpc`.

        Sleeping, new weights and a reset of the prefix cache leave it: drafts change no output.
        """
        if self.adapter is not None:
            self.adapter.forget_rows()
            # Among them are requests of whose end the scheduler tells with the next step.
            self.adapter.verifier.guard.reset(self.adapter.running)

    def _begin_drafting(self, adapter: V2Adapter) -> None:
        parallel = self.parallel_config
        # Pipeline stages and data-parallel ranks would have to take part in the steps of the check.
        checks = (
            self.checks_start and parallel.world_size_across_dp == parallel.tensor_parallel_size
        )
        reasons = (
            reason_against_drafts(self, adapter, _first_reason)
            for reason_against_drafts in (loaded("checks", "drafts") if checks else ())
        )
        why = next(filter(None, reasons), None)
        if why is None:
            adapter.start_drafting()
        else:
            adapter.switch_off(why)

    @Symbols("v1.worker.gpu_worker:Worker.", TREE_DRAFTS).overrides("saves what was learned")
    def shutdown(self) -> None:
        if self.adapter is not None:
            self.adapter.close()
        super().shutdown()


def _first_reason(why: str | None) -> str | None:
    """Return the first reason of all tensor-parallel ranks, each of which waits for the others."""
    group = get_tp_group()
    reasons: list[str | None] = [why] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(reasons, why, group=group.cpu_group)
    return next(filter(None, reasons), None)
