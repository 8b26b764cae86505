"""A step of tree speculation on Model Runner V2: of chains, which vLLM verifies.

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
from typing import TYPE_CHECKING, Any, Literal, cast

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
from vllm_trie.vllm_hooks.worker.calibration import expect_measured
from vllm_trie.vllm_hooks.worker.drafting.neural_v2 import V2Chains
from vllm_trie.vllm_hooks.worker.runners import v2_lengths
from vllm_trie.vllm_hooks.worker.runners.adapter import Adapter, Step
from vllm_trie.vllm_hooks.worker.runners.v2_requests import RequestText
from vllm_trie.vllm_hooks.worker.verification.compaction import compact_on_device
from vllm_trie.vllm_hooks.worker.verification.sampling import likeliest_on_device
from vllm_trie.vllm_hooks.worker.verifier import TreeStep, TreeVerifier

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
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

Arrays = tuple[np.ndarray, np.ndarray]


class V2Adapter(Adapter):
    """The step of a worker, whose drafts are rows of draft tokens.

    Args:
        trees, chain_only: See :class:`Adapter`.
        req_states: The runner's.
        device: Of the model.

    Attributes:
        num_drafted: int64 [max_num_seqs] on the device, drafted tokens of each request, by the
            runner's request index.
    """

    runner: GPUModelRunner
    sampler_class: Callable[..., RejectionSampler] | None = None
    """Takes the place of vLLM's rejection sampler; None for one that knows of fillers."""

    def __init__(
        self,
        trees: TreeVerifier,
        chain_only: bool,
        req_states: RequestState,
        device: torch.device,
    ) -> None:
        super().__init__(trees, chain_only)
        self.num_drafted = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=device)
        self._req_states = req_states
        self._device = device
        self._requests: dict[str, RequestText] = {}
        self._unread: set[str] = set()  # requests whose prompt the drafter has not seen
        self._graph_lengths: Collection[int] = ()
        self._state: Literal["warm-up", "drafting", "off"] = "warm-up"
        # Steps that nobody waits for, oldest first, and when their tokens arrive.
        self._unwaited: deque[tuple[torch.cuda.Event, Step]] = deque()
        self._num_ahead = 0  # launches since the last wait
        self._launched_at = 0.0
        self._stats: TreeStats | None = None  # not sent yet
        if trees.budget is not None:
            trees.budget.drafting_waits = True
        self._chains: V2Chains | None = None

    def step(self, scheduled: SchedulerOutput) -> Step:
        """Run one step. Each ``yield`` returns to vLLM, whose runner does its own part and goes on
        here with what it has made: the overrides of :mod:`.v2` call :meth:`go_on`."""
        trees = self.trees
        cut, fillers = self._cut(scheduled)
        if not self.is_drafting:  # vLLM's warm-up, or an engine that is switched off
            grammar = yield "masks", cut.output
            yield "end", (cut.masks(grammar), fillers)
            return
        started = time.perf_counter()

        # Receive the batch, with as many places for each draft as it verifies.
        batch: InputBatch = yield "inputs", cut.output
        texts = [self._requests[request_id] for request_id in batch.req_ids]
        drafts = {
            text.data.req_id: text.drafted[: cut.verified[text.data.req_id]]
            for text in texts
            if text.drafted and cut.verified.get(text.data.req_id)
        }
        num_tokens = cut.output.total_num_scheduled_tokens
        num_fillers = sum(cut.verified.values()) - sum(map(len, drafts.values()))
        step = trees.begin_step(batch.req_ids, drafts, num_tokens, started, num_fillers)
        # By what all ranks know: in pauses they take in tokens at different times.
        step.is_pausing |= not any(text.may_draft for text in texts)

        # Place: positions of nodes follow their depth, once the KV slots follow from flat ones.
        slot_mappings = yield "positions", None
        draft_rows = self.place(step, batch)

        # Verify, on the device. The host gets its copies of what was there before the tokens, too.
        grammar = yield "masks", None
        likeliest, argmax = self._copies_of(step, (yield "logits", (cut.masks(grammar), fillers)))
        path = yield "path", draft_rows
        tokens, counts = yield "tokens", None
        arrived = torch.cuda.Event(blocking=True)
        tokens, counts = async_copy_to_np(tokens), async_copy_to_np(counts)
        arrived.record()
        hidden_states, max_nodes = yield "states", None
        if path is not None and step.tree_batch is not None:  # behind the copy of the output
            compact_on_device(self.cache_groups, list(slot_mappings), *path)
        self._read_prompts(texts, max_nodes)

        wait = self._wait_cause(step, max_nodes)
        if wait is None:
            # Nobody drafts after this step, nor waits for its tokens.
            # An assignment of a number by index would wait for the device.
            self.num_drafted.index_fill_(0, batch.idx_mapping, 0)
            del hidden_states
            following, seconds = yield "launch", None
            self._observe_unwaited(step, following, seconds)
            for text in texts:
                text.drafted = []
            yield "arrival", arrived
            self._take_in(step, texts, tokens, counts)
            return

        # Draft, after vLLM has sent the tokens off, so that no answer waits for it.
        yield "drafts", None
        is_behind = self._num_ahead > 0
        self._wait_for(arrived, wait)
        new_tokens = _extended(texts, tokens, counts)
        rows = _drafted_rows(step, batch)
        if likeliest is not None:
            step.likeliest = likeliest[0][rows], likeliest[1][rows]
        if argmax is not None:
            step.argmax = argmax[rows]
        trees.accept(step, step.paths_of(new_tokens))
        # Of a step that began behind others, as after a pause, the duration is unknown.
        trees.end_step(step, new_tokens, is_timed=not is_behind)
        paths: list[list[int]] = [[] for _ in texts]
        if wait != "verification":
            start = time.perf_counter()
            if trees.guard.drafter.needs_hidden_states:
                on_device = async_tensor_h2d(rows, device=self._device)
                hidden_states = hidden_states[batch.logits_indices[on_device]]
            requests = self._draft_requests(texts, new_tokens, max_nodes)
            paths = trees.draft(step, requests, hidden_states, start)
        for text, drafted in zip(texts, paths, strict=True):
            text.drafted = drafted
        self._keep_stats()
        yield "end", self._put_on_device(batch, paths, max_nodes)

    # -- start-up ----------------------------------------------------------------------------------

    def take_neural_drafter(self, speculator: DraftModelSpeculator) -> None:
        """Hand vLLM's speculator to the union that it is a part of."""
        union = cast("TrieUnionDrafter", self.trees.guard.drafter)
        assert union.neural is not None
        length = min(union.neural.options.num_speculative_tokens, union.context.num_nodes)
        self._chains = union.neural.source = V2Chains(speculator, length, self.propose)

    def attach_cache(self) -> None:
        """Learn that the runner's KV cache is there."""
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
        else:
            super().warm_up()

    def run_forward(self, num_tokens: int) -> None:
        self.runner._dummy_run(num_tokens)
        torch.accelerator.synchronize()

    def begin(self) -> None:
        """Draft from now on: requests before this call are not worth learning from."""
        self._state = "drafting"

    def switch_off(self, why: str) -> None:
        """Serve without drafts, without waits, and as soon as an output leaves, with a count."""
        self._state, self.waits_for = "off", "end"
        self._graph_lengths = ()
        self._unwaited.clear()
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

    @property
    def running(self) -> Collection[str]:
        return self._requests.keys()

    def release(self, request_ids: Iterable[str]) -> None:
        if not self.is_drafting:
            return
        for request_id in request_ids:
            text = self._requests.pop(request_id, None)
            self._unread.discard(request_id)
            self.trees.release(request_id, None if text is None else text.ended_request())

    # -- what the runner asks for ------------------------------------------------------------------

    def launch(self, output: SchedulerOutput) -> SchedulerOutput:
        """Draft after the last step, or let it run on; begin a step, and return it cut to what it
        verifies."""
        if self.is_drafting:
            self.draft()
            now = time.perf_counter()
            seconds, self._launched_at = now - self._launched_at, now
            if self.waits_for == "launch":
                self._unwaited.append((self.go_on("launch", (output, seconds)), self._step))
            while self._unwaited and self._unwaited[0][0].query():
                next(self._unwaited.popleft()[1], None)
        cut: SchedulerOutput = self.begin_step(self.step(output))
        return cut

    def draft(self) -> Any:
        """Draft after the step that was launched last, unless nobody waits for it; return the draft
        tokens, int64 [requests, N]."""
        return self.go_on("drafts") if self.waits_for == "drafts" else None

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
        self.go_on("states", (hidden_states, max_nodes))
        drafts: torch.Tensor | None = self.draft() if self.runner.use_pp else None
        if drafts is None:
            drafts = batch.idx_mapping.new_zeros((batch.num_reqs, self.num_places))
        return drafts

    def finish(self, output: AsyncOutput, fillers: Mapping[str, int]) -> None:
        """Attach statistics to the output that vLLM sends to the scheduler.

        Args:
            output: Of the step.
            fillers: Of the step. The statistics are of the steps before.
        """
        setattr(output.model_runner_output, FILLERS_ATTRIBUTE, fillers)
        stats, self._stats = self._stats, None
        if stats is not None:
            setattr(output.model_runner_output, STATS_ATTRIBUTE, stats)

    def forget_stats(self) -> None:
        """Forget the statistics of requests that no user sent."""
        self._stats = None
        self.trees.totals = TreeStats()

    # -- parts of a step ---------------------------------------------------------------------------

    def _cut(self, output: SchedulerOutput) -> tuple[v2_lengths.CutStep, dict[str, int]]:
        """Return the step cut to what it verifies, and the places that have no drafted token."""
        places = output.scheduled_spec_decode_tokens
        running = self._requests.keys() - {request.req_id for request in output.scheduled_new_reqs}
        drafted = {
            name: len(self._requests[name].drafted) if name in running else 0 for name in places
        }
        fillers = {name: max(len(places[name]) - n, 0) for name, n in drafted.items()}
        # Earlier pipeline stages know no lengths, and the warm-up compiles for full drafts.
        is_full = self.runner.use_pp or self._state == "warm-up"
        return v2_lengths.cut(output, drafted, None if is_full else self._graph_lengths), fillers

    def place(self, step: TreeStep, batch: InputBatch) -> Any:
        """Put the step's trees in place; return what their verification reads.

        Args:
            step: Changed.
            batch: Of the step; positions of nodes are changed.
        """

    def _copies_of(
        self, step: TreeStep, logits: torch.Tensor | None
    ) -> tuple[Arrays | None, np.ndarray | None]:
        """Start copies to the host, for drafters that read them, before anything changes the
        logits.

        Returns:
            The likeliest tokens of each row and their probabilities; the argmax of each row of
            trees.
        """
        if logits is None:
            return None, None
        likeliest = argmax = None
        if not self.chain_only and self.trees.guard.drafter.needs_node_argmax:
            argmax = async_copy_to_np(logits.argmax(dim=-1))
        if self.trees.reads_rows(step, len(logits)):
            tokens, probabilities = likeliest_on_device(logits)
            likeliest = async_copy_to_np(tokens), async_copy_to_np(probabilities)
        return likeliest, argmax

    def _read_prompts(self, texts: Sequence[RequestText], max_nodes: int) -> None:
        """Let the drafter read the prompts that the device is computing."""
        unread = [text for text in texts if text.data.req_id in self._unread]
        if unread:
            self._unread.difference_update(text.data.req_id for text in unread)
            requests = [self._draft_request(text, max_nodes) for text in unread]
            self.trees.guard.read_prompts([request for request in requests if request is not None])

    def _wait_cause(self, step: TreeStep, max_nodes: int) -> WaitCause | None:
        """Return why the launch after the step that runs waits for its tokens, None if it does
        not."""
        if not step.is_pausing and max_nodes:
            return "pause_end" if self._num_ahead else "drafting"
        return "verification" if step.has_drafts else None

    def _observe_unwaited(self, step: TreeStep, following: SchedulerOutput, seconds: float) -> None:
        """Let the budget observe the time between the launches of a step and of its successor."""
        self._num_ahead += 1
        # One launch follows another as fast as steps end, once the engine is as far ahead as it
        # gets. After a while without work it goes on with other requests.
        goes_on = not following.num_scheduled_tokens.keys().isdisjoint(step.request_ids)
        if self.trees.budget is not None and self._num_ahead > _MOST_AHEAD and goes_on:
            self.trees.budget.observe_unwaited(step.num_decode_tokens, seconds)

    def _take_in(
        self, step: TreeStep, texts: Sequence[RequestText], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Take in the tokens of a step that nobody has waited for."""
        new_tokens = [
            some if self._requests.get(text.data.req_id) is text else []  # ended meanwhile
            for text, some in zip(texts, _extended(texts, tokens, counts), strict=True)
        ]
        self.trees.end_step(step, new_tokens, is_timed=False)
        self._keep_stats()

    def _wait_for(self, arrived: torch.cuda.Event, cause: WaitCause) -> None:
        """Wait for a step's tokens, the one wait for the device."""
        arrived.synchronize()
        self.trees.count_wait(cause)
        while self._unwaited:  # steps before it, which have ended, too
            next(self._unwaited.popleft()[1], None)
        self._num_ahead = 0

    def _keep_stats(self) -> None:
        stats = self.trees.take_stats()
        if stats is not None and self._stats is not None:
            stats.add(self._stats)
        self._stats = stats or self._stats

    def _draft_requests(
        self, texts: Sequence[RequestText], new_tokens: Sequence[Sequence[int]], max_nodes: int
    ) -> dict[int, DraftRequest]:
        """Return the requests that get a draft, by batch index."""
        requests = (
            self._draft_request(text, max_nodes) if tokens and not text.has_ended else None
            for text, tokens in zip(texts, new_tokens, strict=True)
        )
        return {index: request for index, request in enumerate(requests) if request is not None}

    def _draft_request(self, request: RequestText, max_nodes: int) -> DraftRequest | None:
        max_model_len = self._req_states.max_model_len
        return request.draft_request(max_model_len, max_nodes, self._needs_chain)

    def _needs_chain(self, params: SamplingParams) -> bool:
        """Return whether a request's draft must be a chain, as structured outputs always do."""
        return True

    def _put_on_device(
        self, batch: InputBatch, drafts: Sequence[Sequence[int]], max_nodes: int
    ) -> torch.Tensor:
        """Write the drafts where the next step reads them; return them."""
        width = self.num_places
        packed = np.full((len(drafts), width + 1), _FILLER, dtype=np.int64)
        for row, draft in zip(packed, drafts, strict=True):
            row[: len(draft)] = draft
            row[width] = len(draft)
        on_device = async_tensor_h2d(packed, device=self._device)
        self.num_drafted[batch.idx_mapping] = on_device[:, width]
        if not self.runner.use_pp:  # there vLLM does it
            self._req_states.draft_tokens[batch.idx_mapping] = on_device[:, :width]
            # With structured outputs the scheduler reads them, before their step samples.
            self.runner.draft_tokens_handler.set_draft_tokens(batch, on_device[:, :max_nodes])
        return on_device[:, :width]


def _extended(
    texts: Sequence[RequestText], tokens: np.ndarray, counts: np.ndarray
) -> list[Sequence[int]]:
    """Add a step's tokens, which have arrived, to the texts; return those before their ends."""
    rows = zip(texts, tokens.tolist(), counts, strict=True)
    return [text.extend(row[:count]) for text, row, count in rows]


def _drafted_rows(step: TreeStep, batch: InputBatch) -> np.ndarray:
    """Return int64 [rows], the rows of logits without those of fillers."""
    num_rows = np.array([tree.num_nodes + 1 for tree in step.trees])
    fillers_before = batch.cu_num_logits_np[:-1] - (num_rows.cumsum() - num_rows)
    rows: np.ndarray = np.arange(num_rows.sum()) + np.repeat(fillers_before, num_rows)
    return rows
