"""Tree verification where vLLM's runner asks its proposer for it.

On stock vLLM, :class:`TreeRunnerMixin` is put in front of the runner's class and its overrides call
``super()``. A patched vLLM calls the proposer at the same places instead. The mixin then works on
an object of its own, beside the runner: it reads the runner through it, and ``super()`` is what
vLLM has done already.
"""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.spec_decode.draft_verifier import DraftVerifier

from vllm_trie.attention import TreeBatch
from vllm_trie.vllm_hooks.worker.calibration import calibrate_step_cost
from vllm_trie.vllm_hooks.worker.cpu_worker import CPU_BACKEND_CLASS
from vllm_trie.vllm_hooks.worker.drafting.proposer import TreeProposer
from vllm_trie.vllm_hooks.worker.runner_v1 import TreeRunnerMixin
from vllm_trie.vllm_hooks.worker.stats import STATS_ATTRIBUTE


class RunnerView:
    """A model runner as the mixin's base class: its attributes, and overridden methods done."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        if name == "runner":  # not set yet
            raise AttributeError(name)
        return getattr(self.runner, name)

    def execute_model(self, *unused: Any) -> None:
        """The runner goes on by itself."""

    def load_model(self, *unused: Any) -> None:
        """The model is loaded."""

    def _prepare_inputs(self, *unused: Any) -> None:
        """The inputs are prepared."""

    def _on_request_state_removed(self, *unused: Any) -> None:
        """The request is gone."""

    def sample_tokens(self, output: Any) -> Any:
        """The tokens are sampled."""
        return output


class TreeVerification(TreeRunnerMixin, RunnerView):
    """State and work of tree verification, beside a runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.init_trees()


class TreeDraftVerifier(TreeProposer, DraftVerifier):
    """The proposer of our methods, which verifies its drafts.

    Attributes:
        trees: the step's trees and what became of them; set by :meth:`bind`.
    """

    trees: TreeVerification

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        # The only platform that :mod:`vllm_trie.vllm_hooks.setup.support` lets through; the runner
        # makes its proposer before it loads the model, so this is in time.
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND_CLASS)

    def bind(self, runner: Any) -> None:
        self.trees = TreeVerification(runner)

    def load_model(self, target_model: Any, *unused: Any, **unused_too: Any) -> None:
        super().load_model(target_model)
        self.trees.load_model()

    def warm_up(self) -> None:
        calibrate_step_cost(self.trees)

    def keeps_to_max_model_len(self) -> bool:
        return True

    def remove_request(self, req_id: str) -> None:
        self.trees._on_request_state_removed(req_id, None)

    def start_step(self) -> None:
        self.trees.execute_model()

    def spec_decode_metadata(self, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> Any:
        return self.trees._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)

    def place_drafts(self, scheduler_output: Any, num_scheduled_tokens: Any) -> None:
        self.trees._prepare_inputs(scheduler_output, num_scheduled_tokens)

    def draft_trees(self) -> TreeBatch | None:
        return self.trees._tree_batch

    def verify(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return self.trees._sample(logits, spec_decode_metadata)

    def propose_for_step(self, step: Any) -> list[list[int]]:
        return self.trees.propose_draft_token_ids(
            step.scheduler_output,
            step.sampled_token_ids,
            step.sampling_metadata,
            step.hidden_states,
            step.sample_hidden_states,
        )

    def take_stats(self) -> dict[str, Any] | None:
        report = getattr(self.trees.sample_tokens(SimpleNamespace()), STATS_ATTRIBUTE, None)
        return None if report is None else asdict(report)
