"""A step of tree speculation on Model Runner V2: of chains, which vLLM verifies.

:mod:`.v2_trees` adds trees. vLLM schedules the same number N of draft tokens for every request, as
placeholders, before it knows them; this keeps asynchronous scheduling. The worker drafts where it
launches the next step, so that a step's output leaves before anything waits for it::

    device   [ step k ]                    [ step k + 1 ]
    worker   launches k     waits, drafts, launches k + 1
    engine                                               output of k, schedules k + 2

Or it launches the step ahead of its drafts, for which the device waits (:mod:`.v2_delivery`)::

    device   [ step k ]               [ step k + 1 ]
    worker   launches k + 1, waits, drafts
    engine                                  output of k, schedules k + 2

Steps after which nobody drafts, as the node budget pauses or the batch is too large, are not waited
for: their tokens are taken in once they have arrived, and before the next wait at the latest::

    device   [ step k ][ step k + 1 ]
    worker   launches k + 1, takes in k - 1
    engine             output of k, schedules k + 2

A step then verifies what was drafted, or as many places as were planned ahead
(:mod:`.v2_lengths`). Where it must verify more than was drafted, a draft is filled up with tokens
that verification rejects unseen::

    row of a request   [ drafted tokens ][ 0 ... 0 ]     N tokens
    num_drafted          number of the former
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.budget import DraftForecast
from vllm_trie.drafts.engine.runners import v2_lengths
from vllm_trie.drafts.engine.runners.adapter import Adapter, Step
from vllm_trie.drafts.engine.runners.v2_delivery import Delivery, DraftPlaces, packed
from vllm_trie.drafts.engine.runners.v2_launched import LaunchedStep, StepsInFlight
from vllm_trie.drafts.engine.runners.v2_requests import RequestText
from vllm_trie.drafts.engine.start.calibration import expect_measured
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.drafts.engine.verification.compaction import compact
from vllm_trie.drafts.engine.verification.kernels import likeliest_on_device
from vllm_trie.drafts.engine.verifier import EarlyDrafts, TreeVerifier
from vllm_trie.hooks.wire import FILLERS_ATTRIBUTE, STATS_ATTRIBUTE, TreeStats
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.states import RequestState

_NO_TOKEN = -1
"""Where a draft has ended, to vLLM's scheduler: a grammar needs no mask from there on."""


class V2Adapter(Adapter):
    """The step of a worker, whose drafts are rows of draft tokens.

    Args:
        verifier: See :class:`Adapter`.
        req_states: The runner's.
        device: Of the model.
        launches_ahead: Whether to launch steps ahead of their drafts, where that is possible.
    """

    chain_only = True
    runner: GPUModelRunner
    sampler_class: Callable[..., RejectionSampler] | None = None
    """Takes the place of vLLM's rejection sampler; None for one that knows of fillers."""

    def __init__(
        self,
        verifier: TreeVerifier,
        req_states: RequestState,
        device: torch.device,
        launches_ahead: bool = False,
    ) -> None:
        super().__init__(verifier)
        # Heads read hidden states of the step before.
        launches_ahead = launches_ahead and not verifier.guard.drafter.needs_hidden_states
        self._delivery = Delivery(req_states.draft_tokens, launches_ahead)
        if self._delivery.can_wait:
            verifier.forecast = DraftForecast(req_states.num_speculative_steps)
        self._req_states = req_states
        self._device = device
        self._requests: dict[str, RequestText] = {}
        self._graph_lengths: Collection[int] = ()
        self._state: Literal["warm-up", "drafting", "off"] = "warm-up"
        self._in_flight = StepsInFlight(verifier, self._take_in)
        self._fillers: Mapping[str, int] = {}  # places of the step without a drafted token
        self._delivered_at = 0.0  # the last drafts
        self._stats: TreeStats | None = None  # not sent yet

    def step(self, scheduled: SchedulerOutput) -> Step:
        """Run one step. Each ``yield`` returns to vLLM, whose runner does its own part and goes on
        here with what it has made: the overrides of :mod:`.v2` call :meth:`resume`.

        They are, in their order, ``prepare_inputs`` (`requests`, `inputs`), the metadata of trees
        (`positions`), ``sample_tokens`` (`masks`), the rejection sampler (`logits`, of trees also
        `path`), ``sample`` (`tokens`) and ``propose`` (`states`).
        """
        verifier = self.verifier
        if not self.is_drafting:  # vLLM's warm-up, or an engine that is switched off
            cut = self._cut(scheduled)
            self._fillers = cut.scheduled
            grammar = yield "masks", cut.output
            yield "end", cut.masks(grammar)
            return

        # Draft for this step, unless it is launched ahead of its drafts.
        planned = self._plan(scheduled)
        is_ahead = planned is not None
        if not is_ahead:
            self.draft()
            self._in_flight.leave_last(scheduled)
        self._in_flight.take_in_arrived()  # before vLLM releases requests that ended in them
        cut = self._cut(scheduled, planned)
        started = time.perf_counter()
        yield "requests", cut.output
        places = {name: length for name, length in cut.places.items() if length}
        drafts = self._let_device_wait(places) if is_ahead else self._write_drafts(places)

        # Receive the batch, with as many places for each draft as it verifies.
        batch: InputBatch = yield "inputs", None
        texts = [self._requests[request_id] for request_id in batch.req_ids]
        num_tokens = cut.output.total_num_scheduled_tokens
        drafts_yet = None if is_ahead else drafts
        first_rows = batch.cu_num_logits_np.tolist()
        may_draft = any(text.may_draft for text in texts)
        step = verifier.begin_step(
            batch.req_ids, drafts_yet, num_tokens, first_rows, started, may_draft
        )

        # Place: positions of nodes follow their depth, once the KV slots follow from flat ones.
        slot_mappings = yield "positions", None
        draft_rows = self.place(step, batch)

        # Verify, on the device. The host gets its copies of what was there before the tokens, too.
        grammar = yield "masks", None
        self._read_logits(step, (yield "logits", cut.masks(grammar)))
        step.path = yield "path", draft_rows
        tokens, counts = yield "tokens", None
        arrived = torch.cuda.Event()  # the device waits while a blocking one wakes the host
        tokens, counts = async_copy_to_np(tokens), async_copy_to_np(counts)
        arrived.record()
        hidden_states, max_nodes = yield "states", None
        if step.path is not None and step.tree_batch is not None:  # behind the output's copy
            query_tokens, rows = step.path
            compact(self.cache_groups, slot_mappings, query_tokens[rows], query_tokens)
        self._read_prompts(texts, max_nodes)

        # Draft for this step at last, while the step before has ended and this one waits.
        if is_ahead:
            if drafts is None:
                drafts = self._draft_for_waiting_step(places)
            verifier.take_drafts(step, drafts)
            step.started = self._delivered_at
        assert drafts is not None
        self._fillers = {
            name: number - len(drafts.get(name, ())) for name, number in cut.scheduled.items()
        }
        states = None
        if verifier.guard.drafter.needs_hidden_states:
            states = hidden_states[batch.logits_indices]
        results = tokens, counts, arrived, states
        self._in_flight.last = LaunchedStep(step, texts, *results, max_nodes)
        yield "end", None

    # -- start-up ----------------------------------------------------------------------------------

    def load_model(self, target_model: torch.nn.Module, *unused: Any, **unused_too: Any) -> None:
        super().load_model(target_model)
        sampler: Any = self.runner.sampler
        sampler.sample = partial(self._sample, sampler.sample)

    def _sample(
        self, original: Callable[..., Any], logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Let the step read the logits before vLLM's sampler, where the rejection sampler has not
        shown them: vLLM leaves it out of steps without drafts."""
        if self.waits_for == "logits":
            self.resume("logits", logits)
        return original(logits, *args, **kwargs)

    @property
    def num_draft_tokens(self) -> int:
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
            expect_measured(self.verifier.budget, tables[1] / 1000)
        else:
            super().warm_up()
        if self.verifier.guard.drafter.needs_rows:  # compile what reads them; vLLM pads to 64
            size, dtype = runner.vocab_size, cast("torch.dtype", runner.dtype)
            logits = torch.zeros(2, -(-size // 64) * 64, dtype=dtype, device=self._device)
            likeliest_on_device(logits[:, :size])

    def run_forward(self, num_tokens: int) -> None:
        self.runner._dummy_run(num_tokens)
        torch.accelerator.synchronize()

    def start_drafting(self) -> None:
        """Draft from now on: requests before this call are not worth learning from."""
        self._state = "drafting"

    def switch_off(self, why: str) -> None:
        """Serve without drafts, without waits, and as soon as an output leaves, with a count."""
        super().switch_off(why)
        self._state = "off"
        self.verifier.step = TreeStep()  # no later step may have the trees of one that failed
        self._graph_lengths = ()
        self._in_flight.clear()
        self._requests.clear()
        self._stats = TreeStats(draft_failures=self.verifier.guard.take_new_failures())

    # -- requests ----------------------------------------------------------------------------------

    def add_requests(self, new_requests: Sequence[NewRequestData]) -> None:
        """Take in requests that start, or start again after a preemption."""
        if not self.is_drafting:
            return
        for data in new_requests:
            self._requests[data.req_id] = RequestText.of(data, self._req_states.max_model_len)
        for observer in self.verifier.observers:
            observer.begun(new_requests)

    @property
    def running(self) -> Collection[str]:
        return self._requests.keys()

    def release(self, request_ids: Iterable[str]) -> None:
        if not self.is_drafting:
            return
        for request_id in request_ids:
            text = self._requests.pop(request_id, None)
            self.verifier.release(request_id, None if text is None else text.ended_request())

    # -- what the runner asks for ------------------------------------------------------------------

    @property
    def num_drafted(self) -> torch.Tensor:
        """int64 [max_num_seqs] on the device, drafted tokens of the requests whose drafts the step
        verifies, by the runner's request index."""
        return self._delivery.num_drafted

    @property
    def launches_ahead(self) -> bool:
        """Whether steps are launched ahead of their drafts, which need nothing of the device."""
        return self._delivery.can_wait and self.is_drafting

    def draft(self) -> bool:
        """Wait for the step that was launched last and draft after it, unless nobody waits for it;
        return whether it has waited."""
        last = self._in_flight.last
        if last is None:
            return False
        if self._in_flight.wait_cause is None:
            for text in last.texts:
                text.drafted = []
            return False
        self._draft_after(self._in_flight.wait())
        self.verifier.clock.leave(time.perf_counter())
        self._keep_stats()
        return True

    def fill_in(self, drafts: DraftTokenIds | None) -> None:
        """Put drafted tokens in the place of placeholders, which the scheduler reads for structured
        outputs before their step samples."""
        if drafts is None:
            return
        for request_id, row in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if text := self._requests.get(request_id):
                row[:] = [*text.drafted, *[_NO_TOKEN] * len(row)][: len(row)]

    def propose(
        self, batch: InputBatch, hidden_states: torch.Tensor, max_nodes: int
    ) -> torch.Tensor:
        """Return the draft tokens of each request, int64 [requests, N]: placeholders, most often.

        The step that verifies the drafts begins with them. With pipeline stages they are drafts.

        Args:
            batch: Of the step.
            hidden_states: [tokens of the step, hidden_size].
            max_nodes: The scheduler's limit on a draft.
        """
        self.resume("states", (hidden_states, max_nodes))
        if not (self.runner.use_pp and self.draft()):
            return batch.idx_mapping.new_zeros((batch.num_reqs, self.num_draft_tokens))
        drafts = [self._requests[request_id].drafted for request_id in batch.req_ids]
        return async_tensor_h2d(packed(drafts, self.num_draft_tokens), device=self._device)[:, 1:]

    def finish(self, output: AsyncOutput) -> None:
        """Attach the step's fillers and the statistics of the steps before to the output that vLLM
        sends to the scheduler."""
        setattr(output.model_runner_output, FILLERS_ATTRIBUTE, self._fillers)
        self._keep_stats()
        stats, self._stats = self._stats, None
        if stats is not None:
            setattr(output.model_runner_output, STATS_ATTRIBUTE, stats)

    def forget_rows(self) -> None:
        self._in_flight.forget_rows()

    def forget_stats(self) -> None:
        super().forget_stats()
        self._stats = None

    # -- parts of a step ---------------------------------------------------------------------------

    def _plan(self, output: SchedulerOutput) -> dict[str, int] | None:
        """Return the places of each draft, by request id, in a step that is launched ahead of them;
        None where drafts come first.

        They do with prefills or searches in the step, as these may wait for the device, and with
        structured outputs, for whose masks the scheduler reads drafts.
        """
        places = output.scheduled_spec_decode_tokens
        if (
            not self.launches_ahead
            or self._in_flight.wait_cause is None
            or output.has_structured_output_requests
            or output.total_num_scheduled_tokens != sum(1 + len(some) for some in places.values())
        ):
            return None
        lengths = self.verifier.planned_lengths({name: len(some) for name, some in places.items()})
        return lengths if any(lengths.values()) else None

    def _cut(
        self, output: SchedulerOutput, lengths: Mapping[str, int] | None = None
    ) -> v2_lengths.CutStep:
        """Return the step cut to what it verifies: to places that were planned, or to drafts."""
        if lengths is None:
            lengths = dict.fromkeys(output.scheduled_spec_decode_tokens, 0)
            new = {data.req_id for data in output.scheduled_new_reqs}
            for name in (lengths.keys() & self._requests.keys()) - new:
                lengths[name] = len(self._requests[name].drafted)
        # Earlier pipeline stages know no lengths, and the warm-up compiles for full drafts.
        is_full = (
            self.runner.use_pp
            or self._state == "warm-up"
            or v2_lengths.has_prompt_like_decode(output, self.num_draft_tokens)
        )
        return v2_lengths.cut(output, lengths, None if is_full else self._graph_lengths)

    def _write_drafts(self, places: Mapping[str, int]) -> dict[str, list[int]]:
        """Write a step's drafts to the device, where it has places for any; return them."""
        drafts = self._drafts_of(places)
        if places:
            self._delivery.send(self._slots_of(places), list(drafts.values()))
        return {name: draft for name, draft in drafts.items() if draft}

    def _let_device_wait(self, places: Mapping[str, int]) -> dict[str, list[int]] | None:
        """Let the device wait for a step's drafts; return them where there is no device, but a CPU,
        which computes what is launched at once."""
        self._delivery.reserve(self._slots_of(places))
        drafts = self._draft_for_waiting_step(places) if self._device.type == "cpu" else None
        self._delivery.launch()
        return drafts

    def _draft_for_waiting_step(self, places: Mapping[str, int]) -> dict[str, list[int]]:
        """Draft for a step that the device waits with, and let it go on; return the drafts.

        The device is idle from the tokens to the drafts: what can be done earlier or later, is.
        """
        last = self._in_flight.last
        assert last is not None, "a step is launched ahead behind another"
        early = prepared = None
        if self._in_flight.only_last:
            before = self._draft_requests(last, [*map(self._is_running, last.texts)])
            for index, request in before.items():
                last.step.show_rows(request, index)
            prepared = self.verifier.prepare(last.step, before, last.tokens.shape[1])
        if prepared is not None:
            rows = DraftPlaces(prepared.request_ids, places, self.num_draft_tokens)
        self._in_flight.wait()
        if prepared is not None:
            start = time.perf_counter()
            arrived = (np.ascontiguousarray(a, dtype=np.int64) for a in (last.tokens, last.counts))
            chains = self.verifier.guard.draft_prepared(prepared, *arrived)
            if chains is not None:
                self._hand_over(rows.packed(*chains))
                early = EarlyDrafts(prepared, before, self._delivered_at - start)
        self._draft_after(last, places, early)
        if early is not None:  # which has none for a request that was not in the last step
            for name in places.keys() - set(early.prepared.request_ids):
                self._requests[name].drafted = []
        drafts = self._drafts_of(places)
        if early is None:
            self._hand_over(packed(list(drafts.values()), self.num_draft_tokens))
        self.verifier.clock.leave(self._delivered_at)
        return {name: draft for name, draft in drafts.items() if draft}

    def _hand_over(self, rows: np.ndarray) -> None:
        """Let the device go on with rows of drafts, see :func:`packed`."""
        self._delivery.deliver(rows)
        self._delivered_at = time.perf_counter()

    def _draft_after(
        self,
        last: LaunchedStep,
        lengths: Mapping[str, int] | None = None,
        early: EarlyDrafts | None = None,
    ) -> None:
        """Take in a step whose tokens have arrived, and draft after it; see
        :meth:`TreeVerifier.draft`."""
        new_tokens = self._take_in(last)
        start = time.perf_counter()
        if early is None:
            requests = self._draft_requests(last, new_tokens)
        else:
            requests = {
                index: request
                for index, request in early.requests.items()
                if last.texts[index].goes_on(request, new_tokens[index])
            }
        self._expect_no_drafts(last.texts, requests)
        paths = self.verifier.draft(last.step, requests, last.hidden_states, start, lengths, early)
        for text, drafted in zip(last.texts, paths, strict=True):
            text.drafted = drafted

    def _drafts_of(self, places: Mapping[str, int]) -> dict[str, list[int]]:
        return {name: self._requests[name].drafted[:length] for name, length in places.items()}

    def _slots_of(self, places: Mapping[str, int]) -> list[int]:
        return [self._req_states.req_id_to_index[name] for name in places]

    def place(self, step: TreeStep, batch: InputBatch) -> Any:
        """Put the step's trees in place; return what their verification reads.

        Args:
            step: Changed.
            batch: Of the step; positions of nodes are changed.
        """

    def flatten(
        self, batch: InputBatch, by_layer: Mapping[str, object], states: Sequence[torch.Tensor]
    ) -> None:
        """Put a step's accepted nodes where a chain has its tokens, for a drafter of vLLM's that
        has a KV cache.

        Args:
            batch: Of the step; its tokens and positions are changed.
            by_layer: Attention metadata, which carries no trees any more.
            states: Hidden states, [tokens of the step, size] each, changed.
        """

    def _read_logits(self, step: TreeStep, logits: torch.Tensor | None) -> None:
        """Start copies to the host, for drafters that read them, before anything changes the
        logits; their content arrives with the step's tokens."""
        if logits is None:
            return
        if not self.chain_only and self.verifier.guard.drafter.needs_node_argmax:
            step.argmax = async_copy_to_np(logits.argmax(dim=-1))
        if self.verifier.reads_rows(step, len(logits)):
            tokens, probabilities = likeliest_on_device(logits)
            step.likeliest = async_copy_to_np(tokens), async_copy_to_np(probabilities)

    def _read_prompts(self, texts: Sequence[RequestText], max_nodes: int) -> None:
        """Let the drafter read the prompts that the device is computing."""
        unread = [text for text in texts if text.is_unread]
        if unread and max_nodes:
            for text in unread:
                text.is_unread = False
            requests = [self._draft_request(text, max_nodes) for text in unread]
            self.verifier.guard.read_prompts(
                [request for request in requests if request is not None]
            )

    def _take_in(self, launched: LaunchedStep) -> list[Sequence[int]]:
        """Take in the tokens of a step, which have arrived; return those of each request before its
        end."""
        step = launched.step
        arrived = launched.tokens.tolist(), launched.counts.tolist()
        rows = zip(launched.texts, *arrived, strict=True)
        new_tokens = [
            text.extend(row[:count]) if self._is_running(text) else [] for text, row, count in rows
        ]
        # Nobody takes the tokens of a request that has ended meanwhile: its draft is not rejected.
        pairs = zip(step.trees, launched.texts, strict=True)
        step.trees = [t if self._is_running(text) else TokenTree.empty() for t, text in pairs]
        self.verifier.accept(step, step.paths_of(new_tokens))
        self.verifier.end_step(step, new_tokens)
        return new_tokens

    def _keep_stats(self) -> None:
        stats = self.verifier.take_stats()
        if stats is not None and self._stats is not None:
            stats.add(self._stats)
        self._stats = stats or self._stats

    def _draft_requests(
        self, last: LaunchedStep, is_left: Sequence[object]
    ) -> dict[int, DraftRequest]:
        """Return the requests of a step that get a draft, by batch index.

        Args:
            last: The step.
            is_left: Of each request, true if it goes on.
        """
        requests = (
            self._draft_request(text, last.max_nodes) if left else None
            for text, left in zip(last.texts, is_left, strict=True)
        )
        return {index: request for index, request in enumerate(requests) if request is not None}

    def _is_running(self, text: RequestText) -> bool:
        """Return whether a request has neither ended nor started again since its step began."""
        return self._requests.get(text.request_id) is text

    def _expect_no_drafts(
        self, texts: Sequence[RequestText], requests: Mapping[int, DraftRequest]
    ) -> None:
        """Let steps that are launched ahead have no places for requests without drafts."""
        if self.verifier.forecast is not None:
            without = {
                text.request_id: np.empty(0)
                for index, text in enumerate(texts)
                if index not in requests and self._is_running(text)
            }
            self.verifier.forecast.observe(without)

    def _draft_request(self, request: RequestText, max_nodes: int) -> DraftRequest | None:
        max_model_len = self._req_states.max_model_len
        return request.draft_request(max_model_len, max_nodes, self._needs_chain(request.params))

    def _needs_chain(self, params: SamplingParams) -> bool:
        """Return whether a request's draft must be a chain, as structured outputs always do."""
        return True
