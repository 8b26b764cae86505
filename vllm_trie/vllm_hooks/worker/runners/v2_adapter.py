"""Model Runner V2's steps in the terms of :class:`TreeVerifier`: chains, which vLLM verifies.

:mod:`.v2_trees` adds trees. vLLM schedules the same number N of draft tokens for every request, as
placeholders, before it knows them; this keeps asynchronous scheduling. The worker drafts where it
launches the next step, so that a step's output leaves before anything waits for it::

    device   [ step k ]                    [ step k + 1 ]
    worker   launches k     waits, drafts, launches k + 1
    engine                                               output of k, schedules k + 2

Steps after which nobody drafts, as the node budget pauses or the batch is too large, are not waited
for: their tokens are taken in once they have arrived, and before the next wait at the latest::

    device   [ step k ][ step k + 1 ]
    worker   launches k + 1, takes in k - 1
    engine             output of k, schedules k + 2

A step then verifies what was drafted (:mod:`.v2_lengths`). Where it must verify more, a draft is
filled up with tokens that verification rejects unseen::

    row of a request   [ drafted tokens ][ 0 ... 0 ]     N tokens
    num_drafted          number of the former
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from vllm_trie.drafters import DraftRequest
from vllm_trie.vllm_hooks.wire import (
    FILLERS_ATTRIBUTE,
    STATS_ATTRIBUTE,
    TreeStats,
    WaitCause,
)
from vllm_trie.vllm_hooks.worker.calibration import calibrate_step_cost, expect_measured
from vllm_trie.vllm_hooks.worker.drafting.neural_v2 import V2Chains
from vllm_trie.vllm_hooks.worker.runners import v2_lengths
from vllm_trie.vllm_hooks.worker.runners.v2_requests import RequestText
from vllm_trie.vllm_hooks.worker.verification.sampling import likeliest_on_device
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_trie.drafters.union import TrieUnionDrafter

_MOST_AHEAD = 2
"""Steps that asynchronous scheduling launches before it reads an output."""
_FILLER = 0
"""Any token of the vocabulary: the model computes it, verification never accepts it."""


class _Sampled(NamedTuple):
    """Tokens of a step on their way to the host."""

    tokens: np.ndarray
    counts: np.ndarray
    has_arrived: torch.cuda.Event


class _Launched(NamedTuple):
    """A step on the device."""

    batch: InputBatch
    texts: list[RequestText]
    """Of the batch; a request that starts again after a preemption gets another one."""
    sampled: _Sampled
    wait: WaitCause | None
    """Why the next launch waits for its tokens; None if it does not."""
    hidden_states: torch.Tensor | None
    """[tokens of the step, hidden_size], where there is to wait."""
    rows: tuple[np.ndarray, np.ndarray] | None
    """The likeliest tokens of each row of logits and their probabilities, which arrive with the
    tokens; None if nobody reads them."""
    max_nodes: int
    """The scheduler's limit on a draft."""
    num_decode_tokens: int
    """0 with prefills among them."""

    def new_tokens(self) -> list[Sequence[int]]:
        """Add the tokens, which have arrived, to the texts; return those before their ends."""
        rows = zip(self.texts, self.sampled.tokens.tolist(), self.sampled.counts, strict=True)
        return [text.extend(row[:count]) for text, row, count in rows]


class V2Adapter:
    """Follows a model runner for its verifier and turns drafts into rows of draft tokens.

    Args:
        trees: The verifier.
        req_states: The runner's.
        device: Of the model.

    Attributes:
        num_drafted: int64 [max_num_seqs] on the device, drafted tokens of each request, by the
            runner's request index.
    """

    runner: GPUModelRunner
    sampler_class: Callable[..., RejectionSampler] | None = None
    """Takes the place of vLLM's rejection sampler; None for one that knows of fillers."""

    def __init__(self, trees: TreeVerifier, req_states: RequestState, device: torch.device) -> None:
        self.trees = trees
        self.num_drafted = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=device)
        self._req_states = req_states
        self._device = device
        self._requests: dict[str, RequestText] = {}
        self._unread: set[str] = set()  # requests whose prompt the drafter has not seen
        self._graph_lengths: Collection[int] = ()
        # Of the step that runs, by request id: scheduled, verified and filled-up draft tokens.
        self._places: Mapping[str, int] = {}
        self._lengths: Mapping[str, int] = {}
        self._fillers: dict[str, int] = {}
        self._state: Literal["warm-up", "drafting", "off"] = "warm-up"
        # On their way to the host.
        self._sampled: _Sampled | None = None
        self._rows: tuple[np.ndarray, np.ndarray] | None = None
        self._launched: _Launched | None = None  # last, after which the next launch waits
        self._queued: deque[_Launched] = deque()  # before it, not waited for, oldest first
        self._num_ahead = 0  # launches since the last wait
        self._launched_at = 0.0
        self._stats: TreeStats | None = None  # not sent yet
        if trees.budget is not None:
            trees.budget.drafting_waits = True
        self._chains: V2Chains | None = None

    # -- start-up ----------------------------------------------------------------------------------

    def take_neural_drafter(self, speculator: DraftModelSpeculator) -> None:
        """Hand vLLM's speculator to the union that it is a part of."""
        union = cast("TrieUnionDrafter", self.trees.guard.drafter)
        assert union.neural is not None
        length = min(union.neural.options.num_speculative_tokens, union.context.num_nodes)
        self._chains = union.neural.source = V2Chains(speculator, length, self.propose)

    def attach(self, runner: GPUModelRunner) -> None:
        """Learn of the runner, whose model is loaded."""
        self.runner = runner

    def attach_cache(self) -> None:
        """Learn of the runner's KV cache."""
        if self._chains is not None:
            self._chains.shorten()

    @property
    def num_places(self) -> int:
        """N, draft tokens that vLLM schedules for each request."""
        return self._req_states.num_speculative_steps

    @property
    def is_drafting(self) -> bool:
        """Whether the plugin takes part in steps: not in vLLM's warm-up, nor switched off."""
        return self._state == "drafting"

    def warm_up(self) -> None:
        """Let the node budget expect the duration of steps, which the warm-up has compiled."""
        runner = self.runner
        manager = runner.adaptive_verification
        # vLLM would trim drafts by what it knew two steps ago.
        runner.adaptive_verification = None
        tables = None if manager is None else manager.cost_tables
        if manager is None:
            self._graph_lengths = v2_lengths.captured_lengths(runner.cudagraph_manager)
        if tables is not None:
            expect_measured(self.trees.budget, tables[1] / 1000)
            return

        def run_step(num_tokens: int) -> None:
            runner._dummy_run(num_tokens)
            torch.accelerator.synchronize()

        num_ranks = runner.parallel_config.world_size_across_dp
        calibrate_step_cost(self.trees.budget, run_step, runner.max_num_tokens, num_ranks)

    def begin(self) -> None:
        """Draft from now on: requests before this call are not worth learning from."""
        self._state = "drafting"

    def switch_off(self, why: str) -> None:
        """Serve without drafts, without waits, and as soon as an output leaves, with a count."""
        self._state = "off"
        self._graph_lengths = ()
        self._launched = None
        self._queued.clear()
        self._requests.clear()
        self.trees.guard.refuse(why)
        self._stats = TreeStats(draft_failures=self.trees.guard.take_new_failures())

    # -- requests ----------------------------------------------------------------------------------

    def add_requests(self, new_requests: Sequence[NewRequestData]) -> None:
        """Take in requests that start, or start again after a preemption."""
        if not self.is_drafting:
            return
        for data in new_requests:
            self._requests[data.req_id] = RequestText.of(data, self._req_states.max_model_len)
            self._unread.add(data.req_id)
        if self.trees.recorder is not None:
            self.trees.recorder.begin(new_requests)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        if not self.is_drafting:
            return
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._unread.discard(request_id)
            self.trees.release(request_id)

    # -- the launch of a step ----------------------------------------------------------------------

    def start(self, output: SchedulerOutput) -> SchedulerOutput:
        """Draft for a step, or let the one before run on; return the step with as many places for
        each draft as it verifies."""
        if self.is_drafting:
            self.draft()
            self._let_run_on(output)
        step = self._fit(output)
        if self.is_drafting and step.num_scheduled_tokens:
            self.trees.start_step(len(step.num_scheduled_tokens))
        return step

    def _let_run_on(self, output: SchedulerOutput) -> None:
        """Queue the last step, if nobody waits for it, and take in those that have ended.

        Args:
            output: The step to be launched.
        """
        now = time.perf_counter()
        seconds, self._launched_at = now - self._launched_at, now
        if (step := self._launched) is not None:
            self._launched = None
            self._num_ahead += 1
            # One launch follows another as fast as steps end, once the engine is as far ahead as it
            # gets. After a while without work it goes on with other requests.
            goes_on = not output.num_scheduled_tokens.keys().isdisjoint(step.batch.req_ids)
            if self.trees.budget is not None and self._num_ahead > _MOST_AHEAD and goes_on:
                self.trees.budget.observe_unwaited(step.num_decode_tokens, seconds)
            for text in step.texts:
                text.drafted = []
            self._queued.append(step)
        while self._queued and self._queued[0].sampled.has_arrived.query():
            self._take_in_unwaited(self._queued.popleft())

    def _take_in_unwaited(self, step: _Launched) -> None:
        new_tokens = {
            text.data.req_id: tokens
            for text, tokens in zip(step.texts, step.new_tokens(), strict=True)
            if self._requests.get(text.data.req_id) is text  # it may have ended meanwhile
        }
        self.trees.take_in(new_tokens)
        self._keep_stats()

    def _fit(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step with as many places for each draft as it verifies."""
        places = output.scheduled_spec_decode_tokens
        self._places = {name: len(tokens) for name, tokens in places.items()}
        running = self._requests.keys() - {request.req_id for request in output.scheduled_new_reqs}
        drafted = {
            name: len(self._requests[name].drafted) if name in running else 0 for name in places
        }
        self._fillers = {name: max(n - drafted[name], 0) for name, n in self._places.items()}
        self._lengths = self._places
        # Earlier pipeline stages know no lengths, and the warm-up compiles for full drafts.
        if not places or self.runner.use_pp or self._state == "warm-up":
            return output
        self._lengths = v2_lengths.draft_lengths(output, drafted, self._graph_lengths)
        return v2_lengths.shortened(output, self._lengths)

    def fit_masks(self, grammar: GrammarOutput | None) -> GrammarOutput | None:
        """Return a grammar's masks of the places that :meth:`start` left."""
        if grammar is None or self._lengths is self._places:
            return grammar
        return v2_lengths.shortened_masks(grammar, self._places, self._lengths)

    def begin_step(self, scheduler_output: SchedulerOutput, request_ids: Sequence[str]) -> None:
        """Tell the verifier what is scheduled of each request's draft."""
        drafts: dict[str, list[int]] = {}
        for request_id, places in scheduler_output.scheduled_spec_decode_tokens.items():
            request = self._requests.get(request_id)
            if request is not None and (drafted := request.drafted[: len(places)]):
                drafts[request_id] = drafted
        self.trees.begin_step(request_ids, drafts, scheduler_output.total_num_scheduled_tokens)

    def place(self, batch: InputBatch, slot_mappings: torch.Tensor) -> None:
        """Put the step's trees in place, once the KV slots follow from flat positions.

        Args:
            batch: Of the step; positions of nodes are changed.
            slot_mappings: int64 [cache groups, tokens of the step].
        """

    # -- drafts ------------------------------------------------------------------------------------

    def keep_sampled(self, tokens: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Start the copy of the step's tokens to the host.

        Args:
            tokens: int64 [requests, up to N + 1].
            num_sampled: int32 [requests].
        """
        if self.is_drafting:
            has_arrived = torch.cuda.Event(blocking=True)
            copies = async_copy_to_np(tokens), async_copy_to_np(num_sampled)
            has_arrived.record()
            self._sampled = _Sampled(*copies, has_arrived)

    def keep_rows(self, logits: torch.Tensor) -> None:
        """Start the copy of each row's likeliest tokens to the host, for drafters that read them.

        Call it before anything changes the logits, and before :meth:`keep_sampled`.
        """
        if self.trees.reads_rows(len(logits)):
            tokens, probabilities = likeliest_on_device(logits)
            self._rows = async_copy_to_np(tokens), async_copy_to_np(probabilities)

    def propose(
        self, batch: InputBatch, hidden_states: torch.Tensor, max_nodes: int
    ) -> torch.Tensor:
        """Return the draft tokens of each request, int64 [requests, N]: placeholders, most often.

        :meth:`draft` replaces them before the next launch. With pipeline stages they are drafts.

        Args:
            batch: Of the step.
            hidden_states: [tokens of the step, hidden_size].
            max_nodes: The scheduler's limit on a draft.
        """
        if self.is_drafting:
            self._read_prompts(batch.req_ids, max_nodes)
            wait = self._wait_cause(max_nodes)
            assert self._sampled is not None
            texts = [self._requests[request_id] for request_id in batch.req_ids]
            states = None if wait is None else hidden_states
            num_tokens = self.trees.num_decode_tokens
            rows, self._rows = self._rows, None
            self._launched = _Launched(
                batch, texts, self._sampled, wait, states, rows, max_nodes, num_tokens
            )
            if wait is None:
                self.num_drafted[batch.idx_mapping] = 0
            elif self.runner.use_pp:
                return self._draft_after(self._take_launched())
        return batch.idx_mapping.new_zeros((batch.num_reqs, self._req_states.num_speculative_steps))

    def _wait_cause(self, max_nodes: int) -> WaitCause | None:
        """Return why the launch after the step that runs waits for its tokens."""
        if not self.trees.is_pausing and max_nodes:
            return "pause_end" if self._num_ahead else "drafting"
        return "verification" if self.trees.has_drafts else None

    def _read_prompts(self, request_ids: Sequence[str], max_nodes: int) -> None:
        """Let the drafter read the prompts that the device is computing."""
        if self._unread.isdisjoint(request_ids):
            return
        unread = [name for name in request_ids if name in self._unread]
        self._unread.difference_update(unread)
        requests = [self._draft_request(self._requests[name], max_nodes) for name in unread]
        self.trees.guard.read_prompts([request for request in requests if request is not None])

    def draft(self) -> None:
        """Draft after the step that was launched last, unless nobody waits for it."""
        if self._launched is None or self._launched.wait is None:
            return
        launched = self._take_launched()
        batch = launched.batch
        drafts = self._draft_after(launched)
        self._req_states.draft_tokens[batch.idx_mapping] = drafts
        # With structured outputs the scheduler reads them, before their step samples.
        self.runner.draft_tokens_handler.set_draft_tokens(batch, drafts[:, : launched.max_nodes])

    def _take_launched(self) -> _Launched:
        launched, self._launched = self._launched, None
        assert launched is not None
        return launched

    def _wait_for(self, step: _Launched) -> list[Sequence[int]]:
        """Wait for a step's tokens, the one wait for the device; return them."""
        step.sampled.has_arrived.synchronize()
        assert step.wait is not None
        self.trees.count_wait(step.wait)
        while self._queued:  # steps before it, which have ended, too
            self._take_in_unwaited(self._queued.popleft())
        self._num_ahead = 0
        return step.new_tokens()

    def _draft_after(self, launched: _Launched) -> torch.Tensor:
        batch, texts = launched.batch, launched.texts
        new_tokens = self._wait_for(launched)
        if launched.rows is not None:
            verified = self._drafted_rows(batch)
            self.trees.likeliest = launched.rows[0][verified], launched.rows[1][verified]
        self.trees.observe_outputs(new_tokens, self._node_argmax(batch))
        # After a pause the step began behind others, so that its duration is unknown.
        self.trees.end_step(new_tokens, is_timed=launched.wait != "pause_end")
        start = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in texts]
        if launched.wait != "verification":
            assert launched.hidden_states is not None
            draft_requests = self._draft_requests(texts, new_tokens, launched.max_nodes)
            rows = self._verified_rows(batch, launched.hidden_states)
            drafts = self.trees.draft(draft_requests, len(texts), rows, start)
        for text, draft in zip(texts, drafts, strict=True):
            text.drafted = draft
        self._keep_stats()
        return self._on_device(batch, drafts)

    def _keep_stats(self) -> None:
        stats = self.trees.take_stats()
        if stats is not None and self._stats is not None:
            stats.add(self._stats)
        self._stats = stats or self._stats

    def _draft_requests(
        self, texts: Sequence[RequestText], new_tokens: Sequence[Sequence[int]], max_nodes: int
    ) -> dict[int, DraftRequest]:
        """Return the requests that get a draft, by batch index."""
        draft_requests = {}
        for index, (text, tokens) in enumerate(zip(texts, new_tokens, strict=True)):
            if not tokens or text.has_ended:
                continue
            drafted = self._draft_request(text, max_nodes)
            if drafted is not None:
                draft_requests[index] = drafted
        return draft_requests

    def _draft_request(self, request: RequestText, max_nodes: int) -> DraftRequest | None:
        max_model_len = self._req_states.max_model_len
        return request.draft_request(max_model_len, max_nodes, self._needs_chain)

    def _needs_chain(self, params: SamplingParams) -> bool:
        """Return whether a request's draft must be a chain, as structured outputs always do."""
        return True

    def _verified_rows(self, batch: InputBatch, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the last committed token and of each drafted one."""
        if not self.trees.guard.drafter.needs_hidden_states:
            return hidden_states[:0]
        rows = async_tensor_h2d(self._drafted_rows(batch), device=self._device)
        return hidden_states[batch.logits_indices[rows]]

    def _drafted_rows(self, batch: InputBatch) -> np.ndarray:
        """Return int64 [rows], the rows of logits without those of fillers."""
        num_rows = [len(tree.token_list) + 1 for tree in self.trees.step_trees]
        first_rows = batch.cu_num_logits_np[:-1]
        return np.concatenate(
            [first + np.arange(n) for first, n in zip(first_rows, num_rows, strict=True)]
        )

    def _node_argmax(self, batch: InputBatch) -> list[int] | None:
        """Return the argmax of each of these rows, None if it is unknown."""
        return None

    def _on_device(self, batch: InputBatch, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        width = self._req_states.num_speculative_steps
        packed = np.full((len(drafts), width + 1), _FILLER, dtype=np.int64)
        for row, draft in zip(packed, drafts, strict=True):
            row[: len(draft)] = draft
            row[width] = len(draft)
        on_device = async_tensor_h2d(packed, device=self._device)
        self.num_drafted[batch.idx_mapping] = on_device[:, width]
        return on_device[:, :width]

    def forget_stats(self) -> None:
        """Forget the statistics of requests that no user sent."""
        self._stats = None
        self.trees.totals = TreeStats()

    def finish(self, output: AsyncOutput) -> None:
        """Attach statistics to the output that vLLM sends to the scheduler.

        The fillers are those of the output's step, the others of the steps before.
        """
        setattr(output.model_runner_output, FILLERS_ATTRIBUTE, self._fillers)
        stats, self._stats = self._stats, None
        if stats is not None:
            setattr(output.model_runner_output, STATS_ATTRIBUTE, stats)
