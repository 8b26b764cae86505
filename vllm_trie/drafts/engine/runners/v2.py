"""Model Runner V2: overrides that call the adapter.

:class:`RunnerV2Mixin` comes before the runner's class in the workers' subclasses, see
:mod:`~vllm_trie.drafts.engine.workers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter
from vllm_trie.drafts.engine.runners.v2_experts import take_shorter_steps
from vllm_trie.drafts.engine.runners.v2_lengths import most_logits_rows
from vllm_trie.drafts.engine.start.draft_support import check_states
from vllm_trie.drafts.engine.start.verifier_setup import make_verifier
from vllm_trie.hooks.ledger.record import PLUGGABLE, STATS, TOKEN_LISTS, TREE_DRAFTS, Symbols
from vllm_trie.hooks.start.runner_choice import PATCHED_V2_METHOD

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, SpeculativeConfig, VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds, LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.states import RequestState
else:
    _Runner = object


logger = init_logger(f"vllm.{__name__}")

_SPECULATION = "v1.worker.gpu.spec_decode."
_runner = Symbols("v1.worker.gpu.model_runner:GPUModelRunner.", TREE_DRAFTS)
_speculator = Symbols(f"{_SPECULATION}speculator:BaseSpeculator.", TREE_DRAFTS)
_rejection_sampler = Symbols(f"{_SPECULATION}rejection_sampler:RejectionSampler.", TREE_DRAFTS)


class HostSpeculator(BaseSpeculator):
    """The plugin's drafter where the runner expects a draft model."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        self.adapter = _make_adapter(vllm_config, device, req_states)
        self._num_tokens = req_states.num_speculative_steps
        # vLLM's name for CUDA graphs of drafts of any length, and for step costs from these graphs.
        # It reads the confidences in steps of its warm-up, and trims nothing.
        self.enable_adaptive_verification = (
            vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            and vllm_config.parallel_config.pipeline_parallel_size == 1
        )
        self.draft_token_confidence_probs = torch.ones(
            req_states.max_num_reqs, self._num_tokens, device=device
        )

    @_speculator.overrides("does nothing")
    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Do nothing: drafters run on the host."""

    @_speculator.overrides("does nothing")
    def capture(self) -> None:
        """Do nothing: drafters run on the host."""

    def prepare_watermarking(self, *unused: object) -> None:
        """Do nothing: drafts carry no watermark, the target's tokens do."""

    @_speculator.overrides("proposes the drafters' drafts")
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: torch.Tensor,
        *unused: object,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **unused_too: object,
    ) -> torch.Tensor:
        """Return what the runner keeps as draft tokens, see :meth:`V2Adapter.propose`."""
        if dummy_run:
            return input_batch.idx_mapping.new_zeros((input_batch.num_reqs, self._num_tokens))
        max_nodes = self._num_tokens if num_speculative_tokens is None else num_speculative_tokens
        return self.adapter.propose(input_batch, last_hidden_states, max_nodes)


class DraftedOnly(RejectionSampler):
    """Accepts tokens that were drafted, and no fillers.

    A rejected filler leaves the target's distribution as it is, so that a request without a draft
    gets the token that it would get without speculation, sampled ones with a seed included.

    Args:
        stock: In whose place this goes.
        spec_config: Of the engine.
        adapter: Knows how many tokens were drafted. Before it drafts, this is vLLM's sampler.
    """

    def __init__(
        self, stock: RejectionSampler, spec_config: SpeculativeConfig, adapter: V2Adapter
    ) -> None:
        device = adapter.num_drafted.device
        super().__init__(stock.sampler, spec_config, device, watermark_key=stock.watermark_key)
        self._adapter = adapter

    @_rejection_sampler.overrides("verifies drafts and no fillers, or trees")
    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        self._requests_of_rows = input_batch.expanded_idx_mapping
        self._dimensions = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        if not self._adapter.is_drafting:
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        self._adapter.resume("logits", logits)
        # Row i of a request verifies its draft token i - 1; row 0 belongs to its last token.
        num_drafted = self._adapter.num_drafted[input_batch.expanded_idx_mapping]
        fillers = input_batch.expanded_local_pos > num_drafted
        if invalid_drafts is not None:
            fillers |= invalid_drafts
        return super().__call__(logits, input_batch, draft_logits, fillers)

    @_rejection_sampler.overrides("returns the logprobs of lists of tokens, too", until=TOKEN_LISTS)
    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """Return the logprobs of the next requests of a step."""
        num_rows = len(logits)
        requests = self._requests_of_rows[:num_rows]
        self._requests_of_rows = self._requests_of_rows[num_rows:]
        num_logprobs, num_token_ids = self._dimensions or (0, 0)
        if not num_token_ids:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        rows = torch.arange(num_rows, dtype=cu_num_logits.dtype, device=logits.device)
        indices = torch.bucketize(rows, cu_num_logits[1:], right=True)
        places = rows - cu_num_logits[indices]
        token_ids = torch.where(places < num_sampled[indices], sampled[indices, places], 0)
        return compute_topk_scores(
            logits,
            num_logprobs,
            token_ids,
            cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=requests,
            max_per_req_token_ids=num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def _make_adapter(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> V2Adapter:
    verifier = make_verifier(vllm_config)
    if config.verification(vllm_config) == "chain":
        launches_ahead = _launches_ahead(vllm_config)
        return V2Adapter(verifier, req_states, device, launches_ahead)
    # Imports much of Model Runner V2, and every worker imports this module.
    from vllm_trie.drafts.engine.runners.v2_trees import V2TreeAdapter

    return V2TreeAdapter(verifier, req_states, device)


def _launches_ahead(vllm_config: VllmConfig) -> bool:
    """Return whether steps may be launched ahead of their drafts.

    Adapters are copied to the device by copies that wait for it, KV connectors may wait for their
    stores, and for layers that attend in chunks vLLM reads the requests' lengths from it. A rank
    whose device gave up its drafts would verify other tokens than the others.
    """
    tree_config = config.read(vllm_config)
    assert tree_config is not None
    return (
        tree_config.engine_options.launch_ahead
        and bool(vllm_config.scheduler_config.async_scheduling)
        and tree_config.speculator is None
        and vllm_config.lora_config is None
        and vllm_config.kv_transfer_config is None
        and vllm_config.model_config.attention_chunk_size is None
        and vllm_config.parallel_config.world_size_across_dp == 1
    )


class RunnerV2Mixin(_Runner):
    """Overrides of Model Runner V2 that draft; everything else stays vLLM's.

    For ranks of the last pipeline stage, which has the speculator.
    """

    speculator: Any
    """A :class:`HostSpeculator`, or with a trained drafter vLLM's own."""
    _rows_of_requests: np.ndarray | None = None  # of the step that is prepared

    @property
    def adapter(self) -> V2Adapter:
        adapter: V2Adapter = self.speculator.adapter
        return adapter

    @_runner.overrides(
        "loads the drafter's weights; the rejection sampler learns how much was drafted, "
        "or gives way to the plugin's, and the model state hands trees to the attention "
        "backend"
    )
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.adapter.runner = self
        self.adapter.load_model(self.model)
        assert self.rejection_sampler is not None
        assert self.speculative_config is not None
        sampler = self.adapter.sampler_class or DraftedOnly
        self.rejection_sampler = sampler(
            self.rejection_sampler, self.speculative_config, self.adapter
        )

    @_runner.overrides(
        "takes the cache tensors, in which accepted nodes' KV moves, and tries again "
        "where CUDA graphs take one length only"
    )
    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: Any = None,
    ) -> None:
        arguments = kv_cache_config, is_profiling, kv_cache_allocation_context
        check_states(kv_cache_config)
        try:
            super().initialize_kv_cache(*arguments)
        except ValueError as error:
            if not getattr(self.speculator, "enable_adaptive_verification", False):
                raise
            logger.info("vllm-trie: CUDA graphs take drafts of one length only: %s", error)
            self.speculator.enable_adaptive_verification = False
            super().initialize_kv_cache(*arguments)
        if not is_profiling and self.aux_output_connector is not None:
            take_shorter_steps(self.aux_output_connector)

    @_runner.overrides(
        "memory profiling sees the logits of a step with full drafts",
        until="vLLM profiles the logits of drafts",
    )
    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Let vLLM's memory profiling see the logits of a step with full drafts.

        vLLM gives the KV cache all memory that profiling left, and profiles one row of logits for
        each request. Verification copies them in float32, a part of bounded size at a time.
        """
        super()._dummy_sampler_run(hidden_states)
        assert self.speculative_config is not None
        tiers = self.speculative_config.num_speculative_tokens_per_batch_size
        assert tiers is not None, "the check of a configuration sets them"
        rows = min(self.max_num_tokens, most_logits_rows(tiers, self.max_num_reqs))
        model: Any = self.model
        logits = model.compute_logits(hidden_states.new_zeros(rows, hidden_states.shape[1]))
        logits[: get_max_chunk_logits(logits.shape[1])].to(torch.float32, copy=True)

    @_runner.overrides(
        "steps are profiled without the context that vLLM gives each token, as drafts share "
        "their request's"
    )
    def _dummy_run(self, num_tokens: int, *args: Any, context_len: int = 0, **kwargs: Any) -> Any:
        return super()._dummy_run(num_tokens, *args, **kwargs)

    @_runner.overrides("forgets ended requests, and keeps the text of new ones for drafters")
    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().finish_requests(scheduler_output)
        self.adapter.release(scheduler_output.finished_req_ids)
        self.adapter.add_requests(scheduler_output.scheduled_new_reqs)

    @_runner.overrides("drafts, and verifies as many tokens as were drafted")
    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        cut = self.adapter.begin_step(self.adapter.step(scheduler_output))
        return super().execute_model(cut, *args, **kwargs)

    @_runner.overrides("drafts before the scheduler asks")
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        self.adapter.draft()
        drafts = super().take_draft_token_ids()
        self.adapter.fill_in(drafts)
        return drafts

    @_runner.overrides("the step writes its drafts where this reads them, and finds them")
    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> InputBatch:
        self.adapter.resume("requests")
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        manager = self.cudagraph_manager
        if manager is not None and manager.varlen_decode and not batch.has_prefill:
            # A graph of drafts of any length was captured for this one; kernels may plan by it.
            batch.max_query_len = self.decode_query_len
        self._rows_of_requests = np.diff(batch.cu_num_logits_np)
        self.adapter.resume("inputs", batch)
        return batch

    @_runner.overrides(
        "names the adapter of each row of logits; vLLM names one for each request, which "
        "is wrong with drafts",
        until="vLLM maps rows of logits to adapters on Model Runner V2",
    )
    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any
    ) -> None:
        # vLLM names the adapter of each request, where its layers take that of each logits row.
        rows, self._rows_of_requests = self._rows_of_requests, None
        if rows is not None and len(rows) == len(prompt_lora_mapping):
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, rows).tolist())
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    @_runner.overrides("starts the copy of the sampled tokens to the host")
    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
        *args: object,
        **kwargs: object,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        sampled = super().sample(hidden_states, input_batch, grammar_output, *args, **kwargs)
        self.adapter.resume("tokens", (sampled[0].sampled_token_ids, sampled[1]))
        return sampled

    @_runner.overrides("attaches the worker's statistics to its output", until=STATS)
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.execute_model_state is None:  # it has failed; None lets vLLM raise why
            return super().sample_tokens(grammar_output)
        output = super().sample_tokens(self.adapter.resume("masks", grammar_output))
        if output is not None:
            self.adapter.finish(output)
        return output


@Symbols("v1.worker.gpu.model_runner:", PLUGGABLE).wraps(
    "init_speculator", "makes the plugin's speculator", scope="v2_runner"
)
def init_speculator(
    original: Callable[..., Any],
    vllm_config: VllmConfig,
    device: torch.device,
    req_states: RequestState,
) -> Any:
    """Make the plugin's speculator where vLLM does not, or take in vLLM's; in place only while a
    worker makes its runner."""
    tree_config = config.read(vllm_config)
    speculative: Any = vllm_config.speculative_config
    assert tree_config is not None
    if tree_config.speculator is None:
        make = original if speculative.method == PATCHED_V2_METHOD else HostSpeculator
        return make(vllm_config, device, req_states)
    speculator = original(tree_config.speculator.configuration(vllm_config), device, req_states)
    speculator.adapter = adapter = _make_adapter(vllm_config, device, req_states)
    tree_config.speculator.attach(speculator, adapter)
    return speculator


@Symbols("config.speculative:SpeculativeConfig.", PLUGGABLE).wraps(
    "use_ngram",
    "keeps the requests' text off the device, which only vLLM's own n-grams read",
    scope="v2_stage",
)
def use_ngram(original: Callable[..., bool], self: SpeculativeConfig) -> bool:
    return False
