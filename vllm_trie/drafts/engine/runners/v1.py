"""Model Runner V1: a step of tree speculation, and the overrides of vLLM's runner that carry it.

It runs on CPUs alone. The mixins come before the runner's class in the subclasses of
:mod:`~vllm_trie.drafts.engine.workers.cpu_worker`: :class:`ChainRunnerMixin` where vLLM verifies
the drafts, :class:`TreeRunnerMixin` where the plugin does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_trie.attention import choose_kernels
from vllm_trie.attention.device_copy import to_device
from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.attention.tree_attention import hand_on
from vllm_trie.drafts.engine.draft_requests import (
    constant_fields,
    draft_request,
    ended_request,
    ends_with,
)
from vllm_trie.drafts.engine.runners.adapter import Adapter, Step
from vllm_trie.drafts.engine.start.verifier_setup import make_verifier
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.drafts.engine.verification import compaction
from vllm_trie.drafts.engine.verification.placement import QueryTokens, follow_depths
from vllm_trie.drafts.engine.verification.sampling import (
    is_plain_greedy,
    sample_greedy,
    sample_levels,
)
from vllm_trie.drafts.ngrams.native import ROW_TOKENS
from vllm_trie.hooks.ledger.record import STATS, TREE_DRAFTS, TREE_MASKS, Symbols
from vllm_trie.hooks.wire import STATS_ATTRIBUTE, may_draft_on_v1

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner

    from vllm_trie.drafts import DraftRequest
else:
    _Runner = object


class V1Speculation(Adapter):
    """The proposer of the plugin's methods, and the step of a worker."""

    runner: _Runner

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(make_verifier(vllm_config))
        self.chain_only = config.verification(vllm_config) == "chain"

    def step(self) -> Step:
        """Run one step. Each ``yield`` returns to vLLM, whose runner does its own part and goes on
        here with what it has made: the overrides below call :meth:`resume`."""
        verifier, runner = self.verifier, self.runner
        started = time.perf_counter()

        # Receive the batch, whose inputs are laid out as if all drafts were chains.
        scheduled: SchedulerOutput = yield "inputs", None
        drafts = scheduled.scheduled_spec_decode_tokens
        # Rows behind those of the scheduled requests are not for drafts.
        new, running = scheduled.scheduled_new_reqs, scheduled.scheduled_cached_reqs
        request_ids = runner.input_batch.req_ids[: len(new) + running.num_reqs]
        num_tokens = scheduled.total_num_scheduled_tokens
        num_rows = (1 + len(drafts.get(request_id, ())) for request_id in request_ids)
        first_rows = [*accumulate(num_rows, initial=0)]
        step = verifier.begin_step(request_ids, drafts, num_tokens, first_rows, started)
        for observer in verifier.observers:
            observer.begun(new)

        # Place: positions of nodes follow their depth. In the forward pass, attention reads
        # `step.tree_batch`.
        if drafts and not self.chain_only:
            # Tree attention is faster for chains, too, than vLLM's kernel for CPUs.
            verifier.place(step, self._query_tokens(), takes_chains=True)

        # Verify: walk down the trees, and move the accepted nodes' KV.
        sampled = None
        logits: torch.Tensor | None = yield "logits", None
        if self.chain_only:
            self._read_logits(step, logits)
        elif logits is not None:
            sampled = self._verify(step, logits)
            self._compact(step)
        new_tokens, hidden_states = yield "tokens", sampled
        if self.chain_only:
            verifier.accept(step, step.paths_of(new_tokens))
        step.ended = time.perf_counter()
        verifier.end_step(step, new_tokens)

        # Draft, after vLLM has sent the tokens off, so that no answer waits for it.
        if not step.is_pausing:
            yield "drafts", None
            start = time.perf_counter()
            requests = self._draft_requests(scheduled, new_tokens)
            yield "end", verifier.draft(step, requests, hidden_states, start)

    def _query_tokens(self) -> QueryTokens:
        runner, batch = self.runner, self.runner.input_batch
        return QueryTokens(
            runner.query_start_loc.np[: batch.num_reqs + 1],
            batch.num_computed_tokens_cpu,
            runner.positions,
        )

    def _verify(self, step: TreeStep, logits: torch.Tensor) -> SamplerOutput:
        """Sample the step's tokens: the accepted nodes' and one more for each request.

        Args:
            step: Changed.
            logits: [logits rows, vocab_size], ``N + 1`` rows for a request with N nodes.
        """
        start = time.perf_counter()
        sampler, metadata = self.runner.sampler, self.runner.input_batch.sampling_metadata
        is_greedy = step.has_drafts and is_plain_greedy(metadata)
        argmax = self._read_logits(step, logits, is_greedy)
        if not step.has_drafts:
            output: SamplerOutput = sampler(logits=logits, sampling_metadata=metadata)
            return output
        if is_greedy:
            assert argmax is not None
            sample = sample_greedy(argmax, step.trees)
        else:
            outputs = cast(list[list[int]], self.runner.input_batch.req_output_token_ids)
            sample = sample_levels(sampler, logits, step.first_rows, step.trees, metadata, outputs)
        self.verifier.accept(step, sample.accepted)
        output = sample.padded(logits.device)
        self.verifier.stats.verification_seconds += time.perf_counter() - start
        return output

    def _read_logits(
        self, step: TreeStep, logits: torch.Tensor | None, needs_argmax: bool = False
    ) -> np.ndarray | None:
        """Read what the drafter wants of a step's logits, before anything changes them.

        Returns:
            The argmax of each row; None if nobody needs it.
        """
        if logits is None:
            return None
        reads_rows = self.verifier.reads_rows(step, len(logits))
        needs_node_argmax = self.verifier.guard.drafter.needs_node_argmax
        if not (reads_rows or needs_argmax or needs_node_argmax):
            return None
        read = choose_kernels().likeliest(logits, ROW_TOKENS if reads_rows else 1)
        argmax: np.ndarray = read[0][:, 0]
        if reads_rows:
            step.likeliest = read
        if needs_node_argmax:
            step.argmax = argmax
        return argmax

    def _compact(self, step: TreeStep) -> None:
        """Move the accepted nodes' KV into place, see :func:`compaction.compact`."""
        if step.tree_batch is None:
            return
        start = time.perf_counter()
        moves = compaction.moved_tokens(step.tree_batch.rows, step.accepted)
        if moves.size:
            tables = self.runner.input_batch.block_table.block_tables
            slot_mappings = [table.slot_mapping.gpu for table in tables]
            on_device = to_device(moves, slot_mappings[0].device)
            compaction.compact(self.cache_groups, slot_mappings, *on_device)
        self.verifier.stats.verification_seconds += time.perf_counter() - start

    def _draft_requests(
        self, scheduled: SchedulerOutput, new_tokens: list[list[int]]
    ) -> dict[int, DraftRequest]:
        """Return the requests that get a draft, by batch index.

        The newest token of each is committed, its KV is not computed yet.
        """
        runner, batch = self.runner, self.runner.input_batch
        requests = {}
        texts = batch.token_ids_cpu.view()
        # A drafter that writes to its view fails instead of changing the request.
        texts.flags.writeable = False
        num_tokens = batch.num_tokens_no_spec[: len(new_tokens)].tolist()
        num_prompt_tokens = batch.num_prompt_tokens[: len(new_tokens)].tolist()
        for index, tokens in enumerate(new_tokens):
            if not tokens:
                continue
            request_id = batch.req_ids[index]
            state = runner.requests[request_id]
            params = state.sampling_params
            if params is None or not may_draft_on_v1(state) or ends_with(params, tokens[-1]):
                continue
            request = draft_request(
                constant_fields(request_id, state, num_prompt_tokens[index]),
                params,
                texts[index, : num_tokens[index]],
                len(state.output_token_ids),
                runner.max_model_len,
                scheduled.num_spec_tokens_to_schedule,
                self.chain_only,
            )
            if request is not None:
                requests[index] = request
        return requests

    @property
    def running(self) -> Collection[str]:
        return self.runner.requests.keys()

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            state, ended = self.runner.requests.get(request_id), None
            if state is not None and state.sampling_params is not None:
                text: list[int] = []
                if may_draft_on_v1(state):
                    text = [*(state.prompt_token_ids or ()), *state.output_token_ids]
                ended = ended_request(
                    constant_fields(request_id, state, state.num_prompt_tokens),
                    state.sampling_params,
                    np.array(text, dtype=np.int32),
                )
            self.verifier.release(request_id, ended)

    # -- what vLLM asks of a proposer --------------------------------------------------------------

    def propose(self, *unused: object, **unused_too: object) -> None:
        """Raise: only a runner without the plugin's overrides calls this."""
        raise NotImplementedError

    def run_forward(self, num_tokens: int) -> None:
        runner = self.runner
        model: Any = runner.model
        hidden_states, _ = runner._dummy_run(num_tokens)
        model.compute_logits(hidden_states[:num_tokens])


_runner = Symbols("v1.worker.gpu_model_runner:GPUModelRunner.", TREE_DRAFTS)


class ChainRunnerMixin(_Runner):
    """Overrides of ``GPUModelRunner`` that carry a step; everything else stays vLLM's."""

    adapter: V1Speculation
    """The proposer, which vLLM makes itself."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        drafter: Any = self.drafter
        self.adapter = drafter
        self.adapter.runner = self
        vars(self.rejection_sampler)["forward"] = self._verify_chains

    def _verify_chains(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify a step's chains by vLLM's rejection sampler, or by walking down them.

        Where a request asks for the logprobs of a list of tokens, vLLM's raises or has none.
        """
        if not sampling_metadata.logprob_token_ids:
            return RejectionSampler.forward(
                self.rejection_sampler, metadata, draft_probs, logits, sampling_metadata
            )
        step = self.adapter.verifier.step
        outputs = cast(list[list[int]], self.input_batch.req_output_token_ids)
        return sample_levels(
            self.sampler, logits, step.first_rows, step.trees, sampling_metadata, outputs
        ).padded(logits.device)

    @contextmanager
    def without_speculation(self, hidden: bool = True) -> Iterator[None]:
        """Let a method of vLLM's take the path of an engine without speculation, if `hidden`.

        ``speculative_config`` is vLLM's only switch, and it is the engine's, not the step's. With
        it, ``_prepare_inputs`` describes drafts that are not there, and ``sample_tokens`` sends the
        scheduler empty drafts of each request, or drafts of zeros if ``_input_fits_in_drafter``
        says no. On a small model this is a noticeable part of a step.
        """
        speculative_config = self.speculative_config
        if hidden:
            self.speculative_config = None
        try:
            yield
        finally:
            self.speculative_config = speculative_config

    @contextmanager
    def _without_discarded_generators(self) -> Iterator[None]:
        """Hide the generators of seeded requests whose prefill goes on.

        Their tokens are discarded. vLLM winds the generators back afterwards, which those of CPUs
        cannot do.
        """
        generators = self.input_batch.generators
        discarded = [i for i in generators if self.discard_request_mask.np[i]]
        hidden = {i: generators.pop(i) for i in discarded}
        try:
            yield
        finally:
            generators.update(hidden)

    @_runner.overrides("begins a step, with its clock; forgets the trees of ended requests")
    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.adapter.begin_step(self.adapter.step())
        self.adapter.release(scheduler_output.finished_req_ids)
        return super().execute_model(scheduler_output, *args, **kwargs)

    @_runner.overrides(
        "the step receives and places its drafts; one without drafts is prepared as if "
        "speculative_config were None"
    )
    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        with self.without_speculation(not scheduler_output.scheduled_spec_decode_tokens):
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.adapter.resume("inputs", scheduler_output)
        return prepared

    @_runner.overrides(
        "reads the logits for the drafter; or walks down the trees losslessly and puts the KV of "
        "accepted nodes in place"
    )
    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> Any:
        self.adapter.resume("logits", logits)
        return super()._sample(logits, spec_decode_metadata)

    @_runner.overrides(
        "ends a step in which no drafts are wanted, which runs as if speculative_config were None; "
        "attaches the worker's statistics; samples partial prefills without their generators",
        until=STATS,
    )
    def sample_tokens(self, grammar_output: Any) -> Any:  # type: ignore[override]
        is_hidden = self.adapter.verifier.step.is_pausing
        with self.without_speculation(is_hidden), self._without_discarded_generators():
            output: Any = super().sample_tokens(grammar_output)
        if is_hidden:
            # `execute_model` saw the configuration and left this to the end of the drafting.
            self.finalize_kv_connector()
            if new_tokens := getattr(output, "sampled_token_ids", None):
                self.adapter.resume("tokens", (new_tokens, None))
        if (stats := self.adapter.verifier.take_stats()) is not None:
            setattr(output, STATS_ATTRIBUTE, stats)
        self.adapter.verifier.clock.leave(time.perf_counter())
        return output

    @_runner.overrides(
        "ends a step: drafters get request ids, hidden states of the accepted node and budgets",
        until="proposers get request ids and hidden states",
    )
    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Any,
        sampling_metadata: SamplingMetadata,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        *unused: object,
        **unused_too: object,
    ) -> list[list[int]]:
        self.adapter.resume("tokens", (sampled_token_ids, sample_hidden_states))
        return [[] for _ in sampled_token_ids]

    @_runner.overrides("drafts, after vLLM has sent the step's tokens off")
    @torch.inference_mode()
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if self.adapter.waits_for == "drafts":
            self._draft_token_ids = self.adapter.resume("drafts")
        return super().take_draft_token_ids()

    @_runner.overrides("keeps length limits per request, not for the whole batch")
    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        # One request near the length limit would cost all others their drafts.
        return True


class TreeRunnerMixin(ChainRunnerMixin):
    """Further overrides, which verify trees."""

    @_runner.overrides("hands the trees to the attention backend", until=TREE_MASKS)
    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built: Any = super()._build_attention_metadata(*args, **kwargs)
        hand_on(self.adapter.verifier.step.tree_batch, built[0])
        return built

    @_runner.overrides("positions of tree nodes follow their depth in all dimensions (M-RoPE)")
    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        preprocessed: Any = super()._preprocess(*args, **kwargs)
        if self.uses_mrope and (places := self.adapter.verifier.step.places) is not None:
            follow_depths(self.mrope_positions.gpu, places)
        return preprocessed

    @_runner.within_wrappers
    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> Any:
        return self.adapter.resume("logits", logits)
