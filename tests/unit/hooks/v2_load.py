"""A random load of Model Runner V2: the plugin's adapter between a pretended engine and device.

All is drawn from one seed. Of requests: prompts in chunks, lengths, stop tokens, grammars,
opt-outs, arrivals, aborts, preemptions, resumptions, further turns of sessions. Of steps: up to
three launched before an output is read, absent requests, beams, limits on drafts, CUDA graphs of
one length, pauses, launches ahead of drafts. Of drafters: lengths, mistakes, what they read,
preparations that fail. The device computes later than it is told, at the latest where somebody
waits; where drafts come too late for it, it verifies none. The model's next token is a function of
the text, as is a draft.

After each step it is checked, against what the device has computed and vLLM's own `check_stop`:

- The drafter is asked for exactly the requests of the last step that go on, with their true texts,
  their room, rows of logits, hidden states, and the nodes that were accepted.
- A step has places for what was drafted. The device verifies exactly what was drafted for the text
  that it has, and no filler. The scheduler is told the number of fillers, and a grammar the drafts.
- Each step is taken in once, in order, with its tokens up to the end of their text, and with
  nothing of requests that have ended, were aborted or started again; their drafts count as none.
  The budget is told the same drafts and accepted nodes, and the duration of steps that have one.
- The host waits for the steps after which it drafts and for no others; where that is possible, the
  next one is launched before, with all places.
- A request is released with its whole output; if it was aborted, with what was taken in. In the end
  nothing is left of any.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.triton_utils import triton
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request
from vllm.v1.worker.gpu import buffer_utils

from tests.oracles.delivery import take_drafts
from tests.unit.hooks.v2_steps import NUM_SLOTS, WIDTH, OneToken, Steps
from vllm_trie.drafts import Drafter, DraftRequest, PreparedDrafts
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.drafts.engine.runners import v2_adapter, v2_delivery
from vllm_trie.drafts.sources import DraftSource
from vllm_trie.hooks.wire import FILLERS_ATTRIBUTE, STATS_ATTRIBUTE, TreeStats
from vllm_trie.tree import TokenTree

NUM_TOKENS, EOS = 12, 2  # the fillers' token is one of the model's
FAULTS = [*[""] * 6, "none", "prepare", "draft", "vocabulary", "wide", "long", "few", "trees"]
"""Where preparing drafts fails; "none" and "wide" are no faults."""


def next_token(tokens: Sequence[int]) -> int:
    """The model, whose texts repeat themselves."""
    return (hash((*tokens[-2:], 0)) >> 8) % NUM_TOKENS


def draft_after(tokens: Sequence[int], most: int) -> list[int]:
    """The draft after a text: tokens of the model up to a mistake."""
    number, text = hash((len(tokens), *tokens[-6:])) >> 8, [*tokens]
    length, num_right = number % (WIDTH + 1), number // 8 % (WIDTH + 2)
    for at in range(min(length, most)):
        text.append((next_token(text) + (at >= num_right)) % NUM_TOKENS)
    return text[len(tokens) :]


@dataclass(eq=False)
class Text:
    """A request since it was started last."""

    request: Request  # vLLM's, with all tokens that the device has computed up to the end
    tokens: list[int]  # on the device, those behind the end, too
    output: list[int]  # what the host has taken in
    num_chunks: int  # of the prompt, not scheduled yet
    num_read: int  # tokens that the engine has
    in_flight: deque[int] = field(default_factory=deque)  # most tokens of each unread step
    places: int = 0  # for the next draft, by the scheduler
    drafted: list[int] = field(default_factory=list)  # the next draft
    is_read: bool = False  # by the drafter
    is_aborted: bool = False
    has_failed: bool = False  # gets no drafts any more

    @property
    def may_draft(self) -> bool:
        params: Any = self.request.sampling_params
        return not params.extra_args and params.max_tokens > 1


@dataclass(eq=False)
class Part:
    """What a step computes for a request."""

    text: Text
    gets_token: bool  # its prefill ends here, or has ended
    scheduled: int  # places for its draft, by the scheduler
    places: int = 0  # and by the adapter
    first_row: int = 0
    drafted: list[int] = field(default_factory=list)  # on the host
    taken: list[int] = field(default_factory=list)  # on the device
    logits: list[int] = field(default_factory=list)  # of each row, the model's token
    kept: list[int] = field(default_factory=list)  # new tokens up to the end of the text
    after: list[int] = field(default_factory=list)  # the text with them
    had_ended: bool = False
    has_ended: bool = False

    @property
    def accepted(self) -> list[int]:
        return [*range(min(len(self.kept) - 1, len(self.drafted)))]


@dataclass(eq=False)
class Launch:
    """A step."""

    parts: dict[str, Part]  # by request id, in the order of the batch
    max_nodes: int  # of the drafts after it
    is_ahead: bool = False  # launched ahead of its drafts
    number: int = -1  # the stream's, of its end
    num_decode_tokens: int = 0  # none with other tokens among them
    pauses: bool = False  # the budget wants no drafts after it
    was_waited: bool = False
    was_left: bool = False  # the host has gone on without waiting
    is_timed: bool = False  # began when the host knew the end of the step before
    gave_up: bool = False  # the drafts came too late
    has_rows: bool = True  # logits of the model's weights

    @property
    def is_wanted(self) -> bool:
        """Whether somebody drafts after it, so that the host waits for it."""
        may_draft = any(part.text.may_draft for part in self.parts.values())
        return may_draft and self.max_nodes > 0 and not self.pauses


# -- the device ------------------------------------------------------------------------------------


class Stream:
    """Computes in the order of launches, later."""

    def __init__(self, rng: random.Random, is_cpu: bool, lateness: float) -> None:
        self._rng, self._is_cpu, self._lateness = rng, is_cpu, lateness
        self._work: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()
        self.num_launched = self.num_done = 0
        self.num_ahead = 0  # kernels so far that wait for drafts
        self.gave_up = False  # the last kernel that takes drafts

    def launch(
        self, work: Callable[[], object], is_ready: Callable[[], bool] | None = None
    ) -> None:
        self._work.append((work, is_ready or (lambda: True)))
        self.num_launched += 1
        if self._is_cpu or self._rng.random() < self._lateness:
            self.run(self.num_launched)
        elif self._rng.random() < 0.2:
            while self._work and self._work[0][1]():
                self.run(self.num_done + 1)

    def run(self, number: int) -> None:
        """Compute until so much is done, without what kernels wait for."""
        while self.num_done < number:
            self.num_done += 1
            self._work.popleft()[0]()

    def copy(self, tensor: torch.Tensor) -> np.ndarray:
        copied = np.full_like(tensor.numpy(), -7)
        self.launch(lambda: np.copyto(copied, tensor.numpy()))
        return copied

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        """Return what launches the kernel that takes drafts."""

        def launch(staged: torch.Tensor, *rest: Any, **options: Any) -> None:
            rows, number = staged[: grid[0]], rest[3]

            def is_ready() -> bool:
                return bool((rows.numpy()[:, 1:] >> 32 == number).all())

            def take() -> None:
                self.gave_up = not is_ready()
                assert self._lateness or not self.gave_up
                take_drafts(rows, *rest)

            self.num_ahead += number > 0
            self.launch(take, is_ready)

        return launch


class Event:
    """An event behind a step's tokens, as vLLM has them on CPUs."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def record(self) -> None:
        self._step, self._number = self._load.step, self._load.stream.num_launched

    def synchronize(self) -> None:
        self._load.check_wait(self._step)
        self._load.stream.run(self._number)


class DeviceEvent(Event):
    def query(self) -> bool:
        return self._load.stream.num_done >= self._number


def shared_memory(size: Any, dtype: torch.dtype) -> Any:
    tensor = torch.zeros(size, dtype=dtype)
    return SimpleNamespace(np=tensor.numpy(), uva=lambda: tensor)


# -- drafter and budget ----------------------------------------------------------------------------


class Guesses(OneToken):
    """Drafts by :func:`draft_after`, and has the load check what it is told."""

    load: Load

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.needs_rows, self.needs_hidden_states = rng.random() < 0.5, rng.random() < 0.1

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            text = self.load.live[request.request_id]
            assert not text.is_read
            assert text.tokens[: len(request.token_ids)] == request.token_ids.tolist()
            text.is_read = True

    def propose(self, requests: Sequence[DraftRequest], is_early: bool = False) -> list[TokenTree]:
        paths = []
        for request in requests:
            self.load.check_request(request, is_early)
            most = min(request.max_nodes, request.max_depth)
            paths.append(draft_after(request.token_ids.tolist(), most))
        return [TokenTree.from_paths([path], WIDTH) for path in paths]

    def prepare(self, requests: Any, rows: Any, num_new: int) -> PreparedDrafts | None:
        assert num_new == WIDTH + 1
        for request in requests:
            assert not Elsewhere().may_extend(request)
            assert not self.load.live[request.request_id].has_failed
        fault = self.rng.choice(FAULTS)
        self.fail_at("prepare", fault)
        return None if fault == "none" else Prepared(self, fault, requests, rows)

    def fail_at(self, place: str, fault: str) -> None:
        if place == fault:
            raise RuntimeError(place)

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        text = self.load.live[request.request_id]
        assert output.tolist() == (text.output if text.may_draft else [])


class Prepared(PreparedDrafts):
    """Drafts that fail, or have another form, where they are told to."""

    def __init__(self, drafter: Guesses, fault: str, requests: Any, rows: Any) -> None:
        self.request_ids = [request.request_id for request in requests]
        self._drafter, self._fault = drafter, fault
        limits = [(request.max_nodes, request.max_depth) for request in requests]
        self._before = [*zip((r.token_ids.tolist() for r in requests), limits, rows, strict=True)]

    def draft(self, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._drafter.fail_at("draft", self._fault)
        behind = -(self._fault != "long")  # a chain, anything may be
        chains = np.full((len(self._before), WIDTH + 3 * (self._fault == "wide")), behind)
        lengths = np.zeros(len(chains), dtype=np.int64)
        for at, (text, (max_nodes, max_depth), row) in enumerate(self._before):
            new = tokens[row, : counts[row]].tolist()
            draft = draft_after(text + new, min(max_nodes, max_depth - len(new)))
            lengths[at], chains[at, : len(draft)] = len(draft), draft
        if self._fault == "vocabulary":
            lengths[0], chains[0, 0] = 1, -3
        return lengths + 9 * (self._fault == "long"), chains[self._fault == "few" :]

    def trees(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if self.request_ids[0] in [request.request_id for request in requests]:
            self._drafter.fail_at("trees", self._fault)
        return self._drafter.propose(requests, is_early=True)


class Elsewhere(DraftSource):
    """A source for some requests, whose drafts are not prepared."""

    def may_extend(self, request: DraftRequest) -> bool:
        return request.request_id[-1] == "2"


class ToldBudget(NodeBudget):
    """Pauses at random, and keeps what it is told."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load, self._left = load, 0
        self.verified: Any = None
        self.num_timed = 0
        self.unwaited: list[int] = []

    def should_draft(self, num_requests: int) -> bool:
        step, rng = self._load.step, self._load.rng
        assert num_requests == len(step.parts)
        self._left = self._left - 1 if self._left else (rng.random() < 0.2) * rng.randint(1, 3)
        step.pauses = self._left > 0
        return not step.pauses

    def observe_verified(self, trees: Any, accepted: Any) -> None:
        self.verified = trees, accepted

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        self.num_timed = num_tokens

    def observe_unwaited(self, num_tokens: int, seconds: float) -> None:
        self.unwaited.append(num_tokens)

    def observe_drafting(self, seconds: float) -> None:
        pass


def raise_assertion(record: logging.LogRecord) -> bool:
    """Raise what the guard of the drafter has caught."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, AssertionError):
        raise error
    return False


# -- the load --------------------------------------------------------------------------------------


class Load(Steps, StepObserver):
    """The load of a seed, on this process's only device.

    Args:
        seed: Of all that is drawn.
        drafter: In place of :class:`Guesses`; its drafts are not compared with a function's.
        lateness: How often a step does not wait for its drafts; None draws it.

    Attributes:
        step, waited: The step that is launched, and the one that the host has waited for last.
        live: The requests that the adapter has, by id.
        verified: The drafts that the device has verified, of each step.
        num_prepared: Batches whose drafts reached the device before anything else was done.
    """

    stops: Sequence[dict[str, Any]] = {}, {"ignore_eos": True}, {"stop_token_ids": [5]}
    lengths: Sequence[int] = 1, 2, 9, 30, 30, 30
    absences: Sequence[float] = 0.05, 0.4  # shares of steps that leave a request out

    def __init__(
        self, seed: int, drafter: Drafter | None = None, lateness: float | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        is_drawn = drafter is None and lateness is None
        self.is_cpu = is_drawn and rng.random() < 0.15
        late = rng.choice([0.0, 0.05]) if lateness is None else lateness
        self.stream = Stream(rng, self.is_cpu, late)
        event = Event if self.is_cpu else DeviceEvent
        self._patch = pytest.MonkeyPatch()
        for place, name, stand_in in (
            (torch.cuda, "Event", lambda: event(self)),
            (v2_delivery, "_take_drafts", self.stream),
            (v2_adapter, "async_copy_to_np", self.stream.copy),
            (v2_adapter, "likeliest_on_device", lambda rows: (rows, torch.ones(rows.shape))),
            (triton, "next_power_of_2", int),
            (buffer_utils, "UvaBuffer", shared_memory),
        ):
            self._patch.setattr(place, name, stand_in, raising=False)
        super().__init__(drafter or Guesses(rng), launches_ahead=not is_drawn or rng.random() < 0.8)
        self.sampler = SimpleNamespace(sample=lambda logits: None)
        self.adapter.load_model(torch.nn.Module())
        if not self.is_cpu:
            self.adapter._device = SimpleNamespace(type="device")  # type: ignore[assignment]
        self._graphs = self.adapter._graph_lengths = rng.choice([(), (), (1, 3)])
        verifier = self.adapter.verifier
        self._budget = verifier.budget = ToldBudget(self) if rng.random() < 0.6 else None
        verifier.observers = [self]
        if isinstance(self.drafter, Guesses):
            self.drafter.load, verifier.guard.sources = self, [Elsewhere()]
        verifier.guard._logger = logging.Logger("tests.v2")
        verifier.guard._logger.addFilter(raise_assertion)
        self._draft_prepared = verifier.guard.draft_prepared
        verifier.guard.draft_prepared = self._note_prepared  # type: ignore[method-assign]
        self._absence = rng.choice(self.absences)
        self._most_unread = rng.choice([1, 2, 3, 3])
        self.step: Any = None
        self._last: Any = None  # the step before
        self.waited: Any = None
        self.live: dict[str, Text] = {}
        self.verified: list[list[list[int]]] = []
        self.num_prepared = 0
        self._early: set[str] | None = None  # whose prepared drafts the device has
        self._running: dict[str, Text] = {}
        self._preempted: dict[str, Text] = {}
        self._to_start: list[Request] = []
        self._gone: set[str] = set()  # requests of which the worker is to be told
        self._grammars: set[str] = set()
        self._num_requests = 0
        self._unread: deque[Launch] = deque()  # steps whose output the engine has not read
        self._in_flight: deque[Launch] = deque()  # steps that the host has not taken in
        self._num_left = 0  # steps since the last wait
        self._unwaited: list[int] = []
        self._num_tokens = 0
        self._waits: dict[str, int] = {}
        self._stats = TreeStats()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *unused: object) -> None:
        self._patch.undo()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._run(self._schedule(may_start=True))

    def end(self) -> None:
        """Run the steps that requests still need, and end the engine."""
        while self._running or self._preempted or self._to_start or self._unread:
            self._run(self._schedule(may_start=False))
        self._run(self._schedule(may_start=False))
        self.adapter.close()
        verifier, guard = self.adapter.verifier, self.adapter.verifier.guard
        kept = self.adapter._requests, verifier._stored_trees, guard._handed_out
        kept += guard._failed_requests, verifier.forecast._rates if verifier.forecast else {}
        assert not any(map(len, (self.live, self._in_flight, *kept)))
        for stats in (self.adapter._stats, verifier.stats):  # not sent
            self._stats.add(stats or TreeStats())
        assert (self._stats.tokens, self._stats.waits) == (self._num_tokens, self._waits)
        assert self._budget is None or self._budget.unwaited == self._unwaited

    # -- vLLM's scheduler and engine ---------------------------------------------------------------

    def _schedule(self, may_start: bool) -> SchedulerOutput:
        rng, output = self.rng, SchedulerOutput.make_empty()
        output.finished_req_ids, self._gone = self._gone, set()
        output.preempted_req_ids = set()
        for name, text in [*self._running.items(), *self._preempted.items()]:
            if may_start and rng.random() < 0.02:
                text.is_aborted = True
                self._forget(name)
                output.finished_req_ids.add(name)
            elif name in self._running and rng.random() < 0.04:
                output.preempted_req_ids.add(name)
                self._preempted[name] = self._running.pop(name)
                if rng.random() < 0.3:  # starts again at once, without what is in flight
                    text.is_aborted = True
                    self._forget(name)
                    self._to_start.append(self._as_read(text))
        for request in self._starting(may_start):
            tokens, num_chunks = [*request.all_token_ids], rng.choice([0, 1, 1, 2])
            text = Text(request, tokens, [*request.output_token_ids], num_chunks, len(tokens))
            # vLLM pads a request of which it has cached all tokens but the last.
            text.places = 0 if num_chunks else WIDTH
            self._running[request.request_id] = text
            new = NewRequestData.from_request(request, (), tokens.copy())
            output.scheduled_new_reqs.append(new)
        self.max_nodes = rng.choice([WIDTH] * 6 + [2, 0])
        new_names = {data.req_id for data in output.scheduled_new_reqs}
        self._parts: dict[str, Part] = {}
        for name, text in self._running.items():
            if name in new_names or rng.random() >= self._absence:
                self._schedule_request(output, name, text)
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        if self._parts and rng.random() < 0.15:
            output.total_num_scheduled_tokens += 3  # beams
        is_async = self._most_unread > 1
        output.has_structured_output_requests = is_async and bool(self._grammars & {*self._parts})
        return output

    def _starting(self, may_start: bool) -> list[Request]:
        rng = self.rng
        requests, self._to_start = self._to_start, []
        num_slots = NUM_SLOTS - len(self._running) - len(requests)
        for name, text in [*self._preempted.items()]:
            if num_slots and not text.in_flight and rng.random() < 0.5:
                num_slots -= 1
                requests.append(self._preempted.pop(name).request)
        if may_start and num_slots and rng.random() < (0.5 if len(self._running) < 3 else 0.08):
            number, self._num_requests = self._num_requests, self._num_requests + 1
            name = f"{number % 2}_{number // 2}"  # two samples of a prompt
            prompt = random.Random(number // 2).choices(range(NUM_TOKENS), k=5)
            requests.append(self._make_request(name, prompt))
        return requests

    def _make_request(self, name: str, prompt: list[int]) -> Request:
        if self.rng.random() < 0.04:
            self._grammars.add(name)
        opt_out = {"extra_args": {"speculation": False}}
        options: dict[str, Any] = self.rng.choice([*self.stops, *self.stops, *self.stops, opt_out])
        params = SamplingParams(max_tokens=self.rng.choice(self.lengths), **options)
        params.update_from_generation_config({}, EOS)
        return Request(name, prompt, params, None)

    def _as_read(self, text: Text) -> Request:
        """Return a request as the engine has it."""
        request, prompt = text.request, text.request.prompt_token_ids
        copied = Request(request.request_id, prompt, request.sampling_params, None)
        copied.append_output_token_ids(
            request.all_token_ids[request.num_prompt_tokens : text.num_read]
        )
        return copied

    def _schedule_request(self, output: SchedulerOutput, name: str, text: Text) -> None:
        if text.num_chunks:
            text.num_chunks -= 1
            places, num_tokens = 0, self.rng.randint(1, 6)
        else:
            most = text.num_read + sum(text.in_flight)
            places = min(text.places, self.max_model_len - most - 1)
            num_tokens = 1 + places
            num_output = text.num_read + len(text.in_flight) - text.request.num_prompt_tokens
            will_end = text.in_flight and num_output >= text.request.max_tokens
            if places < 0 or will_end:
                return
        output.num_scheduled_tokens[name] = num_tokens
        if places:
            output.scheduled_spec_decode_tokens[name] = [-1] * places
        gets_token = not text.num_chunks
        if gets_token:
            text.places = self.max_nodes
        self._parts[name] = Part(text, gets_token, places)
        text.in_flight.append((1 + places) * gets_token)

    def _run(self, output: SchedulerOutput) -> None:
        if self.rng.random() < 0.02:  # other weights
            self.adapter.forget_rows()
            for launch in self._in_flight:
                launch.has_rows = False
        self.execute_model(output)
        if self.step is not None:
            if output.has_structured_output_requests:
                if self._unread:
                    self._read()
                self.take_draft_token_ids()
            self.sample_tokens(None)
            self._unread.append(self.step)
            if len(self._unread) >= self._most_unread:
                self._read()
            if self._most_unread == 1:
                self.take_draft_token_ids()
        elif self._unread:
            self._read()

    def _read(self) -> None:
        """Read the output of a step, for which the engine waits, and end requests."""
        launch = self._unread.popleft()
        self.stream.run(launch.number)
        self.verified.append([part.taken for part in launch.parts.values()])
        for name, part in launch.parts.items():
            text = part.text
            if launch.gave_up:
                assert not part.taken
            elif not (part.had_ended or text.has_failed):
                assert part.taken == part.drafted
            text.in_flight.popleft()
            text.num_read += len(part.kept)
            if part.has_ended and not (part.had_ended or text.is_aborted):
                self._forget(name)
                if self.rng.random() < 0.2:  # a further turn
                    prompt = [*text.request.all_token_ids, 7][-20:]
                    self._to_start.append(self._make_request(name, prompt))
                else:
                    self._gone.add(name)

    def _forget(self, name: str) -> None:
        self._running.pop(name, None)
        self._preempted.pop(name, None)

    # -- vLLM's runner, and checks of what passes between it and the plugin ------------------------

    def execute_model(self, output: SchedulerOutput) -> None:
        self._output, num_ahead = output, self.stream.num_ahead
        self._last = self.step or self._last
        last = self._last
        self.step = Launch(self._parts, self.max_nodes) if self._parts else None
        places = output.scheduled_spec_decode_tokens
        is_ahead = bool(
            self.adapter._delivery.can_wait
            and not self.drafter.needs_hidden_states
            and places
            and last
            and last.is_wanted
            and not last.was_waited
            and not output.has_structured_output_requests
            and output.total_num_scheduled_tokens == sum(1 + len(p) for p in places.values())
        )
        if self.step is not None:
            self.step.is_ahead = is_ahead
        if last is not None and not (last.is_wanted or last.was_left):
            last.was_left = True
            self._num_left += 1
            if self._num_left > 2 and not self._parts.keys().isdisjoint(last.parts):
                self._unwaited.append(last.num_decode_tokens)
        super().execute_model(output)
        assert self.stream.num_ahead == num_ahead + is_ahead
        if last is not None and not is_ahead:
            assert last.was_waited == last.is_wanted

    def prepare_inputs(self, cut: SchedulerOutput) -> Any:
        step, output, num_rows = self.step, self._output, 0
        parts = [part for part in step.parts.values() if part.scheduled]
        # vLLM would sort a prompt of as many tokens before decodes that were cut.
        is_full = step.is_ahead or any(
            not part.scheduled and output.num_scheduled_tokens[name] == 1 + WIDTH
            for name, part in step.parts.items()
        )
        needed = [
            part.scheduled if is_full else min(len(part.text.drafted), part.scheduled)
            for part in parts
        ]
        least = min((part.scheduled for part in step.parts.values()), default=0)
        lengths = [length for length in self._graphs if max(needed, default=9) <= length <= least]
        places = [min(lengths)] * len(parts) if lengths else needed
        for part, length in zip(parts, places, strict=True):
            part.places = length
        for name, part in step.parts.items():
            part.first_row, num_rows = num_rows, num_rows + 1 + part.places
            assert len(cut.scheduled_spec_decode_tokens.get(name, ())) == part.places
            assert len(output.scheduled_spec_decode_tokens.get(name, ())) == part.scheduled
            num_cut = output.num_scheduled_tokens[name] - cut.num_scheduled_tokens[name]
            assert num_cut == part.scheduled - part.places
        num_cut = sum(part.scheduled - part.places for part in parts)
        total = cut.total_num_scheduled_tokens
        assert total == output.total_num_scheduled_tokens - num_cut
        step.num_decode_tokens = total * (total == num_rows)
        return super().prepare_inputs(cut)

    def sample_tokens(self, grammar: Any) -> Any:
        step = self.step
        output = super().sample_tokens(grammar).model_runner_output
        missed = set() if self._early is None else step.parts.keys() - self._early
        self._early = None
        for name, part in step.parts.items():
            part.drafted = [] if name in missed else part.text.drafted[: part.places]
            part.text.drafted = []
        fillers = {n: p.scheduled - len(p.drafted) for n, p in step.parts.items() if p.scheduled}
        assert getattr(output, FILLERS_ATTRIBUTE) == fillers
        self._stats.add(getattr(output, STATS_ATTRIBUTE, TreeStats()))
        assert self._last is None or self._last.was_waited == self._last.is_wanted

    def verify(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        step, slots = self.step, [self.indices[name] for name in batch.req_ids]
        shapes = [(len(batch.positions), 8), (batch.num_reqs, WIDTH + 1), batch.num_reqs]
        arrays = [np.full(shape, -7, dtype=np.int32) for shape in shapes]
        logits, tokens, counts = map(torch.from_numpy, arrays)
        self.stream.launch(lambda: self._compute(step, slots, *arrays))
        self._in_flight.append(step)
        if batch.num_draft_tokens:
            self.adapter.resume("logits", logits)
        else:  # vLLM leaves the rejection sampler out
            self.sampler.sample(logits)
        return tokens, counts

    def sample(self, *arguments: Any) -> Any:
        sampled = super().sample(*arguments)
        self.step.number = self.stream.num_launched
        return sampled

    def _compute(
        self, step: Launch, slots: list[int], logits: Any, tokens: Any, counts: Any
    ) -> None:
        step.gave_up = self.stream.gave_up and any(part.places for part in step.parts.values())
        for index, (slot, part) in enumerate(zip(slots, step.parts.values(), strict=True)):
            text, request = part.text, part.text.request
            draft = self.states.draft_tokens[slot].tolist()[: part.places]
            part.taken = draft[: int(self.adapter.num_drafted[slot])]
            part.logits = [next_token(text.tokens + draft[:at]) for at in range(1 + part.places)]
            rows = slice(part.first_row, part.first_row + 1 + part.places)
            logits[rows] = np.add.outer(part.logits, range(8)) % NUM_TOKENS
            num_right = 0
            while part.taken[num_right:] and part.taken[num_right] == part.logits[num_right]:
                num_right += 1
            new = part.logits[: num_right + 1] if part.gets_token else []
            tokens[index, : len(new)], counts[index] = new, len(new)
            text.tokens += new
            part.had_ended = part.has_ended = request.is_finished()
            for token in new:
                if not part.has_ended:
                    request.append_output_token_ids(token)
                    part.kept.append(token)
                    part.has_ended = check_stop(request, self.max_model_len)
            part.after = [*request.all_token_ids]

    def write(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        self.stream.launch(lambda: self.states.draft_tokens.index_copy_(0, slots, drafts))

    def take_draft_token_ids(self) -> Any:
        drafts = super().take_draft_token_ids()
        for name, row in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if name in self.live:
                assert row == [*self.live[name].drafted, *[-1] * WIDTH][:WIDTH]

    def check_wait(self, step: Launch) -> None:
        assert step.is_wanted
        assert not step.was_waited
        if self.step is not None and self.step.is_ahead:
            assert self.is_cpu or self.step in self._in_flight
        step.was_waited, step.is_timed, self.waited = True, not self._num_left, step
        cause = "pause_end" if self._num_left else "drafting"
        self._waits[cause] = self._waits.get(cause, 0) + 1
        self._num_left = 0

    # -- checks of what the drafter, the budget and observers are told -----------------------------

    def _limits(self, part: Part) -> tuple[int, int]:
        """Return the most nodes and the largest depth of a draft after a request's last step."""
        room, request = self.max_model_len - len(part.after) - 1, part.text.request
        num_output = len(part.after) - request.num_prompt_tokens
        return min(self.waited.max_nodes, room), min(room, request.max_tokens - num_output - 1)

    def check_request(self, request: DraftRequest, is_early: bool) -> None:
        step, part = self.waited, self.waited.parts[request.request_id]
        assert request.token_ids.tolist() == part.after
        max_nodes, max_depth = self._limits(part)
        assert request.max_depth == max_depth
        assert request.chain_only
        assert part.text.is_read
        if self.drafter.needs_hidden_states:
            assert request.hidden_state is not None
            assert request.hidden_state.tolist() == [part.first_row + len(part.accepted)]
        has_drafts = step.is_ahead or any(p.drafted for p in step.parts.values())
        num_rows = sum(1 + p.places for p in step.parts.values())
        shows_rows = self.drafter.needs_rows and step.has_rows and (has_drafts or num_rows <= 16)
        assert (request.rows is not None) == shows_rows
        if request.rows is not None:
            num_right = 1 + len(part.taken)
            assert len(request.rows.tokens) == 1 + len(part.drafted)
            assert request.rows.tokens[:num_right, 0].tolist() == part.logits[:num_right]
        if not is_early:
            assert request.max_nodes == max_nodes
            assert request.last_step is not None
            assert request.last_step.tree.token_list == part.drafted
            assert [*request.last_step.accepted] == part.accepted

    def _note_prepared(self, prepared: Any, *arrived: Any) -> Any:
        drafted = self._draft_prepared(prepared, *arrived)
        if drafted is not None:
            self._early = {*prepared.request_ids}
            self.num_prepared += 1
        return drafted

    def begun(self, requests: Sequence[NewRequestData]) -> None:
        for data in requests:
            self.live[data.req_id] = self._running[data.req_id]

    def ended(self, step: Any, new_tokens: Any, stats: TreeStats) -> None:
        launch, budget = self._in_flight.popleft(), self._budget
        assert 0 <= launch.number <= self.stream.num_done
        assert [*launch.parts] == [*step.request_ids]
        results = zip(launch.parts.items(), new_tokens, step.trees, step.accepted, strict=True)
        for (name, part), new, tree, path in results:
            is_live = self.live.get(name) is part.text
            results_of_live = part.kept, part.drafted, part.accepted
            assert ([*new], tree.token_list, [*path]) == (
                results_of_live if is_live else ([], [], [])
            )
            part.text.output += new
            self._num_tokens += len(new)
        if budget is not None:
            has_drafts = any(part.drafted for part in launch.parts.values())
            assert budget.verified == ((step.trees, step.accepted) if has_drafts else None)
            assert budget.num_timed == launch.num_decode_tokens * launch.is_timed
            budget.verified, budget.num_timed = None, 0

    def drafted(self, request_ids: Any, drafts: Mapping[str, Any], has_failed: Any) -> None:
        is_ahead = self.step is not None and self.step.is_ahead
        for name, part in self.waited.parts.items():
            text, most = part.text, min(self._limits(part))
            goes_on = text.may_draft and part.kept and not part.has_ended and most > 0
            assert (name in drafts) == bool(goes_on and self.live.get(name) is text)
            text.drafted = []
            if name in drafts:
                proposed, tree = drafts[name]
                text.has_failed, text.drafted = has_failed(name), proposed.token_list
                if isinstance(self.drafter, Guesses):
                    draft = draft_after(part.after, most)
                    assert text.drafted == ([] if text.has_failed else draft)
                if is_ahead:
                    places = self.step.parts[name].places if name in self.step.parts else 0
                    text.drafted = text.drafted[:places]
                assert tree.token_list == text.drafted

    def released(self, request_id: str) -> None:
        text = self.live.pop(request_id)
        assert text.is_aborted or text.output == [*text.request.output_token_ids]
