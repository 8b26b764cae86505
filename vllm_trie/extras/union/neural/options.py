"""Options of a trained drafter in a union."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, model_validator

from vllm_trie.drafts.drafter import DrafterOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_trie.drafts.engine.config import EngineOptions

NeuralMethod = Literal["draft_model", "eagle", "eagle3", "mtp"]
NEURAL_METHODS: tuple[str, ...] = get_args(NeuralMethod)
"""Methods of vLLM that draft with weights and a KV cache of their own, and that a union takes."""


class NeuralOptions(DrafterOptions):
    """A trained drafter as an entry of a union's `drafters`."""

    method: NeuralMethod = Field(description="vLLM's name of the method.")
    model: str | None = Field(
        default=None,
        description="Folder or name of the checkpoint; 'mtp' takes the model's own if left out.",
    )
    num_speculative_tokens: int = Field(
        default=4, ge=1, le=16, description="Positions that it predicts, a forward pass for each."
    )

    @model_validator(mode="after")
    def _check_model(self) -> NeuralOptions:
        if self.model is None and self.method != "mtp":
            raise ValueError(
                f"{{'method': {self.method!r}}} needs 'model', the folder or name of its checkpoint"
            )
        return self

    def check(self, vllm_config: VllmConfig, options: EngineOptions) -> None:
        """Refuse a complete configuration that it cannot draft in; see :mod:`.checks`."""
        from vllm_trie.extras.union.neural.checks import check_trained_drafter

        check_trained_drafter(vllm_config, self.method, self.model, options)

    def attach(self, speculator: Any, adapter: Any) -> None:
        """Hand vLLM's speculator to the union, whose heads it becomes."""
        from vllm_trie.extras.union.neural.heads import SpeculatorHeads

        drafter = adapter.trees.guard.drafter
        count = min(self.num_speculative_tokens, drafter.context.num_nodes)
        drafter.heads = SpeculatorHeads(speculator, count, adapter)
