"""Steps of Model Runner V2 in the adapter, with arrays in place of a runner."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.triton_utils import triton
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.oracles.delivery import Kernel
from tests.unit.drafters.support import VOCAB, make_context
from tests.unit.hooks.test_tree_exchange import Rank
from vllm_trie.drafts import Drafter, DrafterOptions, DraftRequest, PreparedDrafts
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.drafts.engine.draft_requests import ended_request
from vllm_trie.drafts.engine.guard import GuardedDrafter
from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.drafts.engine.runners import v2_adapter, v2_delivery
from vllm_trie.drafts.engine.runners.v2 import DraftedOnly
from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter
from vllm_trie.drafts.engine.start.verifier_setup import same_on_all_ranks
from vllm_trie.drafts.engine.verifier import TreeVerifier
from vllm_trie.drafts.ngram_trie import NgramTrieDrafter
from vllm_trie.drafts.sources import DraftSource
from vllm_trie.hooks.wire import STATS_ATTRIBUTE
from vllm_trie.tree import TokenTree

WIDTH = 4
MAX_MODEL_LEN = 20
EOS = 2


class NextNumbers(Drafter):
    """Drafts the numbers after the last token, no further than to the next multiple of five."""

    name = "next_numbers"
    Options = DrafterOptions
    needs_hidden_states = True

    def __init__(self) -> None:
        super().__init__(DrafterOptions(), make_context())
        self.requests: list[DraftRequest] = []
        self.ended: dict[str, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.requests = list(requests)
        paths = []
        for request in requests:
            last = int(request.token_ids[-1])
            length = min((-last) % 5, request.max_nodes, request.max_depth)
            paths.append([*range(last + 1, last + 1 + length)])
        return [TokenTree.from_paths([path], WIDTH) for path in paths]

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        self.ended[request.request_id] = output.tolist()


class Event:
    """An event of a device, which ends nothing by itself.

    Attributes:
        waits: Of all events.
        has_arrived: Whether the work before them has ended.
    """

    waits, has_arrived = 0, False

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        Event.waits += 1

    def query(self) -> bool:
        return Event.has_arrived


class SharedMemory:
    """A stand-in for memory that host and device share."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self._tensor = torch.zeros(size, dtype=dtype)
        self.np = self._tensor.numpy()

    def uva(self) -> torch.Tensor:
        return self._tensor


class Steps:
    """An adapter and the runner's part of its steps."""

    device = torch.device("cpu")

    def __init__(
        self,
        drafter: Drafter | None = None,
        adapter_class: type[V2Adapter] = V2Adapter,
        launches_ahead: bool = False,
    ) -> None:
        self.drafter: Any = drafter or NextNumbers()
        guard = GuardedDrafter(self.drafter, VOCAB, 30.0, logging.getLogger("tests.v2"))
        self.indices: dict[str, int] = {}
        states: Any = SimpleNamespace(
            max_num_reqs=8,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_steps=WIDTH,
            draft_tokens=torch.zeros(8, WIDTH, dtype=torch.int64, device=self.device),
            req_id_to_index=self.indices,
        )
        self.states = states
        self.adapter = adapter_class(TreeVerifier(guard), states, self.device, launches_ahead)
        runner: Any = SimpleNamespace(
            use_pp=False, adaptive_verification=None, cudagraph_manager=None
        )
        self.adapter.runner = runner
        self.adapter.start_drafting()

    def on_device(self, values: Any, dtype: Any = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=dtype))

    def add(self, request_id: str, prompt: list[int], num_output: int = 0, **params: Any) -> None:
        """A request; the last `num_output` tokens of its text are output."""
        sampling_params = SamplingParams(**{"max_tokens": 30, **params})
        sampling_params.update_from_generation_config({}, EOS)
        data: Any = NewRequestData(
            req_id=request_id,
            prompt_token_ids=prompt[: len(prompt) - num_output],
            mm_features=[],
            sampling_params=sampling_params,
            pooling_params=None,
            block_ids=(),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=prompt,
        )
        self.adapter.add_requests([data])
        self.indices.setdefault(request_id, len(self.indices) + 2)

    def step(
        self, sampled: dict[str, list[int]], scheduled: int = 0, max_nodes: int = WIDTH
    ) -> list[list[int]]:
        """Run a step with these tokens sampled, and draft after it; return each request's row of
        draft tokens."""
        self.run_step(sampled, scheduled, max_nodes)
        self.adapter.draft()
        return [self.row_of(request_id) for request_id in sampled]

    def row_of(self, request_id: str) -> list[int]:
        """The draft tokens of a request, and fillers."""
        text = self.adapter._requests.get(request_id)
        drafted = text.drafted if text else []
        return [*drafted, *[0] * (WIDTH - len(drafted))]

    def run_step(
        self, sampled: dict[str, list[int]], scheduled: int = 0, max_nodes: int = WIDTH
    ) -> None:
        ids = [*sampled]
        places = {i: [-1] * scheduled for i in ids} if scheduled else {}
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[],
            num_scheduled_tokens=dict.fromkeys(ids, scheduled + 1),
            scheduled_spec_decode_tokens=places,
            has_structured_output_requests=False,
            total_num_scheduled_tokens=len(ids) * (scheduled + 1),
        )
        output = self.adapter.begin_step(self.adapter.step(output))
        num_drafts = np.array([len(output.scheduled_spec_decode_tokens.get(i, ())) for i in ids])
        first_rows = np.cumsum([0, *(1 + num_drafts)])
        num_rows = first_rows[-1]
        batch: Any = SimpleNamespace(
            req_ids=ids,
            num_reqs=len(ids),
            num_draft_tokens=int(num_drafts.sum()),
            num_draft_tokens_per_req=num_drafts,
            num_scheduled_tokens=1 + num_drafts,
            query_start_loc_np=first_rows,
            cu_num_logits_np=first_rows,
            cu_num_logits=self.on_device(first_rows, np.int32),
            idx_mapping=self.on_device([self.indices[i] for i in ids]),
            positions=self.on_device(range(num_rows)),
            input_ids=self.on_device(range(num_rows), np.int32),
            logits_indices=self.on_device(range(1, 1 + num_rows)),
        )
        # Row r of the logits has hidden state [r].
        hidden_states = self.on_device(range(-1, num_rows), np.float32).unsqueeze(1)
        self.adapter.resume("requests")
        self.adapter.resume("inputs", batch)
        self.adapter.resume("positions", [self.on_device(range(1 + num_rows))])
        self.adapter.resume("masks")
        self.verify(batch)
        tokens = np.full((len(ids), WIDTH + 1), -7)
        for row, some in zip(tokens, sampled.values(), strict=True):
            row[: len(some)] = some
        counts = self.on_device([len(some) for some in sampled.values()])
        self.adapter.resume("tokens", (self.on_device(tokens), counts))
        placeholders = self.adapter.propose(batch, hidden_states, max_nodes)
        self.states.draft_tokens[batch.idx_mapping] = placeholders
        self.fillers = self.adapter._fillers

    def verify(self, batch: Any) -> None:
        """Do nothing: what is sampled is given."""

    def statistics(self) -> Any:
        """What is sent with the next output; None if there is nothing."""
        output: Any = SimpleNamespace(model_runner_output=SimpleNamespace())
        self.adapter.finish(output)
        return getattr(output.model_runner_output, STATS_ATTRIBUTE, None)

    def on_the_device(self, request_id: str) -> list[int]:
        """The draft that the device took last for a request."""
        slot = self.indices[request_id]
        row: list[int] = self.states.draft_tokens[slot].tolist()
        return row[: int(self.adapter.num_drafted[slot])]


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: Event())
    monkeypatch.setattr(Event, "waits", 0)
    monkeypatch.setattr(Event, "has_arrived", False)
    monkeypatch.setattr(v2_delivery, "_take_drafts", Kernel())
    monkeypatch.setattr(triton, "next_power_of_2", lambda number: number, raising=False)
    monkeypatch.setattr(buffer_utils, "UvaBuffer", SharedMemory)
    return Steps()


@pytest.mark.parametrize(
    ("first", "sampled", "places", "drafted", "accepted"),
    [(13, [14, 15, 3], WIDTH, [14, 15], (0, 1)), (11, [12, 9], 2, [12, 13], (0,))],
)
def test_drafts_are_verified_without_fillers_and_cut(
    steps, first, sampled, places, drafted, accepted
):
    steps.add("a", [7, 8])
    assert steps.step({"a": []}) == [[0] * WIDTH]  # a prefill in chunks
    assert steps.statistics() is None
    steps.step({"a": [first]})
    steps.step({"a": sampled}, scheduled=places)
    (request,) = steps.drafter.requests
    assert (request.last_step.tree.token_list, request.last_step.accepted) == (drafted, accepted)
    assert steps.fillers == {"a": places - len(drafted)}
    assert request.token_ids.tolist() == [7, 8, first, *sampled]


def test_the_logits_of_steps_without_drafts_are_read(steps, monkeypatch):
    """vLLM has them sampled without the rejection sampler."""
    logits = torch.rand(1, VOCAB)
    likeliest = logits.int(), logits
    monkeypatch.setattr(v2_adapter, "likeliest_on_device", lambda logits: likeliest)
    sampler = steps.adapter.runner.sampler = SimpleNamespace(sample=lambda logits, batch: batch)
    steps.drafter.needs_rows = True
    steps.adapter.load_model(torch.nn.Module())
    monkeypatch.setattr(steps, "verify", lambda batch: sampler.sample(logits, batch))
    steps.add("a", [7, 8])
    steps.step({"a": [11]})
    (request,) = steps.drafter.requests
    assert request.rows.probabilities.tolist() == logits.tolist()


@pytest.mark.parametrize(
    ("params", "sampled", "counted"),
    [
        ({}, [12, EOS, 13], 2),
        ({"min_tokens": 4}, [12, EOS, 13], 2),  # vLLM masks EOS before, and does not look then
        ({"ignore_eos": True}, [12, EOS, 13], 3),
        ({"ignore_eos": True}, [12, 13, EOS], 3),
        ({"ignore_eos": True, "stop_token_ids": [12]}, [12, 13, EOS], 1),
        ({"max_tokens": 3}, [12, 13, 14], 2),
    ],
)
def test_a_text_ends_where_the_scheduler_ends_it(steps, params, sampled, counted):
    """Scheduled ahead, an ended request runs once more; nothing learns from that."""
    steps.add("a", [7, 8], **params)
    steps.step({"a": [11]})
    steps.drafter.requests = []
    steps.step({"a": sampled}, scheduled=WIDTH)
    continues = counted == len(sampled)
    assert bool(steps.drafter.requests) == continues
    if not continues:
        assert steps.step({"a": [16]}) == [[0] * WIDTH]
        assert not steps.drafter.requests
    stats = steps.statistics()
    assert stats.tokens == 1 + counted
    text = steps.adapter._requests["a"]
    steps.adapter.release(["a"])
    assert steps.drafter.ended == {"a": [11, *sampled[:counted]]}
    if "max_tokens" not in params:  # no draft is longer
        # Model Runner V1 keeps what the step has computed behind the end.
        token_ids = np.array([7, 8, 11, *sampled], dtype=np.int32)
        whole = ended_request(text.constant, text.params, token_ids)
        assert whole.token_ids.tolist() == [7, 8, 11, *sampled[:counted]]


WITHOUT_DRAFTS: dict[str, dict[str, Any]] = {
    "speculation": {"extra_args": {"speculation": False}},
    "one token": {"max_tokens": 1},
}


def test_nobody_waits_for_requests_without_drafts_and_nothing_learns_from_them(steps):
    for name, params in WITHOUT_DRAFTS.items():
        steps.add(name, [7, 8], **params)
    drafts = steps.step({name: [11] for name in WITHOUT_DRAFTS})
    assert drafts == [[0] * WIDTH] * len(WITHOUT_DRAFTS)
    assert (steps.drafter.requests, Event.waits) == ([], 0)
    steps.add("a", [7, 8])
    steps.step({"speculation": [12], "a": [13]})
    assert [request.request_id for request in steps.drafter.requests] == ["a"]
    assert Event.waits == 1
    steps.adapter.release(WITHOUT_DRAFTS)
    assert not any(steps.drafter.ended.values())


@pytest.mark.parametrize("params", WITHOUT_DRAFTS.values(), ids=WITHOUT_DRAFTS)
def test_a_session_whose_last_turn_has_no_drafts_is_forgotten(steps, params):
    steps.add("a", [7, 8])
    steps.step({"a": [11]})
    steps.add("a", [7, 8, 11, 9], **params)
    steps.step({"a": [12]})
    steps.adapter.release(["a"])
    assert steps.drafter.ended == {"a": []}


def test_the_scheduler_sees_drafted_tokens_and_no_fillers(steps):
    """A grammar would follow other tokens than -1, one mask each."""
    steps.add("a", [7, 8])
    steps.add("b", [7, 8], max_tokens=1)
    steps.step({"a": [12], "b": [11]})
    rows = [[0] * WIDTH, [0] * WIDTH, [0]]
    steps.adapter.fill_in(SimpleNamespace(req_ids=["a", "b", "a"], draft_token_ids=rows))
    assert rows == [[13, 14, 15, -1], [-1] * WIDTH, [13]]


def test_drafts_end_before_the_length_limit(steps):
    steps.add("a", list(range(MAX_MODEL_LEN - 4)))
    steps.step({"a": [11]})
    (request,) = steps.drafter.requests
    assert (request.max_nodes, request.max_depth) == (2, 2)
    assert steps.step({"a": [12, 13, 14]}, scheduled=2) == [[0] * WIDTH]


def test_a_request_that_starts_again(steps):
    """After a preemption, its prefill holds the output too, and its draft is gone."""
    steps.add("a", [7, 8])
    steps.step({"a": [11]})
    steps.add("a", [7, 8, 11], num_output=1)
    steps.step({"a": []}, scheduled=WIDTH)
    steps.step({"a": [12]})
    (request,) = steps.drafter.requests
    assert request.token_ids.tolist() == [7, 8, 11, 12]
    assert request.num_prompt_tokens == 2
    assert request.last_step.accepted == ()


def test_requests_of_the_warm_up_are_not_drafted_for(steps):
    steps.adapter._state = "warm-up"
    steps.add("_warmup_0_", [7, 8])
    assert steps.step({"_warmup_0_": [11]}) == [[0] * WIDTH]
    assert not steps.drafter.requests


def test_prompts_are_read_once_while_the_device_computes_them(steps):
    read: list[list[int]] = []
    steps.drafter.read_prompts = lambda requests: read.extend(
        request.token_ids.tolist() for request in requests
    )
    steps.add("a", [7, 8])
    steps.add("b", [9], extra_args={"speculation": False})
    for _ in range(2):
        steps.step({"a": [11], "b": [3]})
    assert read == [[7, 8]]


class Pausing(NodeBudget):
    """Pauses where it is told to."""

    pauses = False

    def __init__(self) -> None:
        super().__init__()
        self.unwaited: list[int] = []
        self.waited: list[int] = []

    def should_draft(self, num_rows: int) -> bool:
        return not self.pauses

    def observe_unwaited(self, num_tokens: int, seconds: float) -> None:
        self.unwaited.append(num_tokens)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        self.waited.append(num_tokens)


@pytest.fixture
def budget(steps):
    steps.adapter.trees.budget = Pausing()
    return steps.adapter.trees.budget


def test_a_pause_waits_at_its_end_only(steps, budget):
    steps.add("a", [7, 8])
    steps.add("b", [7, 8])
    steps.step({"a": [11], "b": [20]})
    assert Event.waits == 1
    budget.pauses = True
    steps.drafter.requests = []
    # The last drafts are verified yet.
    assert steps.step({"a": [12, 13], "b": [21]}, scheduled=WIDTH) == [[0] * WIDTH] * 2
    for token in range(14, 19):
        assert steps.step({"a": [token], "b": [token + 8]}, scheduled=WIDTH) == [[0] * WIDTH] * 2
    assert not steps.drafter.requests
    assert Event.waits == 1
    assert steps.adapter._requests["a"].num_tokens == 3
    # The first two launches of a pause follow each other faster than steps end.
    assert budget.unwaited == [2, 2, 2]
    assert len(budget.waited) == 1
    budget.pauses = False
    assert steps.step({"a": [31], "b": [31]}, scheduled=WIDTH) == [[32, 33, 34, 35]] * 2
    assert Event.waits == 2
    assert len(budget.waited) == 1  # the device had others to compute before
    assert steps.drafter.requests[0].token_ids.tolist() == [7, 8, *range(11, 19), 31]
    stats = steps.statistics()
    assert stats.waits == {"drafting": 1, "pause_end": 1}
    assert (stats.steps, stats.tokens) == (2 * 8, 2 + 3 + 2 * 6)


def test_steps_with_fillers_are_timed(steps, budget):
    """CUDA graphs take one length, and drafts are filled up to it."""
    steps.adapter._graph_lengths = {3}
    steps.add("a", [7, 8])
    steps.add("b", [7, 8])
    steps.step({"a": [13], "b": [10]})
    steps.step({"a": [14], "b": [15]}, scheduled=WIDTH)
    assert budget.waited == [2, 2 + 2 * 3]


@pytest.mark.parametrize("can_be_asked", [True, False], ids=["device", "vLLM's on a CPU"])
def test_a_pause_takes_in_what_has_arrived(steps, budget, monkeypatch, can_be_asked):
    """Texts of requests that end or start again meanwhile are left as they are."""
    budget.pauses = True
    for name in "abc":
        steps.add(name, [7, 8])
    steps.step({"a": [11], "b": [11], "c": [11]})
    steps.adapter.release(["b"])
    steps.step({"a": [12], "c": [12]})
    steps.add("c", [7, 8, 11, 12], num_output=2)
    Event.has_arrived = True
    if not can_be_asked:
        monkeypatch.delattr(Event, "query")
    steps.step({"a": [13], "c": []})
    texts = {
        name: text.token_ids[: text.num_tokens] for name, text in steps.adapter._requests.items()
    }
    assert {name: text.tolist() for name, text in texts.items()} == {
        "a": [7, 8, 11, 12],
        "c": [7, 8, 11, 12],
    }
    assert Event.waits == 0
    steps.adapter.close()
    assert steps.drafter.ended == {"b": [], "a": [11, 12], "c": [11, 12]}


def test_nobody_waits_where_the_scheduler_wants_no_drafts(steps):
    steps.add("a", [7, 8])
    for token in (11, 12, 13):
        steps.step({"a": [token]}, max_nodes=0)
    assert Event.waits == 0
    assert steps.step({"a": [14]}) == [[15, 0, 0, 0]]
    assert Event.waits == 1


class Likely(NextNumbers):
    """Drafts one token, whose probability changes from call to call."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        probability = [0.001, 0.5][self.num_calls % 3 == 0]
        return [TokenTree.from_lists([5], [-1], [probability])] * len(requests)


class Timed(NodeBudget):
    """Learns that steps take as long as they were expected to, and drafting nothing."""

    def __init__(self, seconds_of_node: float) -> None:
        super().__init__(drafting_waits=True)
        for num_tokens in (1, 2, 4, 8):
            self.cost.expect(num_tokens, 0.01 + seconds_of_node * num_tokens)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        super().observe_step(num_tokens, self.cost(num_tokens))

    def observe_drafting(self, seconds: float) -> None:
        super().observe_drafting(0.0)


def test_ranks_with_budgets_of_their_own_wait_after_the_same_steps(steps):
    """Nodes are dear on rank 0 and cheap on the other; requests end and begin."""
    ranks = [Steps(Likely()), Steps(Likely())]
    for number, (rank, seconds_of_node) in enumerate(zip(ranks, (1.0, 1e-6), strict=True)):
        group: Any = Rank(number)
        trees = rank.adapter.trees
        trees.budget = Timed(seconds_of_node)
        trees.share_trees = partial(same_on_all_ranks, group=group, budget=trees.budget)
    rng = random.Random(0)
    total = left = 0
    for _ in range(500):
        begins = not left
        if begins:
            left = rng.randint(1, 9)
            for rank in ranks:
                rank.adapter.release(["a"])
                rank.add("a", [7, 8], max_tokens=left)
        left -= 1
        waits = []
        for rank in ranks:
            before = Event.waits
            rank.step({"a": [11]}, scheduled=0 if begins else WIDTH)
            waits.append(Event.waits - before)
        assert waits[0] == waits[1]
        total += waits[0]
    assert 20 < total < 400


def make_sampler(kind: Any, adapter: Any) -> Any:
    """Make a rejection sampler as the runner does."""
    config = SimpleNamespace(
        num_speculative_tokens=WIDTH,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
        fly_entropy_threshold=0.3,  # this and the next since vLLM 0.33
        fly_entropy_top_k=3,
    )
    return kind(SimpleNamespace(sampler=None, watermark_key=None), config, adapter)


def test_only_drafted_tokens_are_valid(monkeypatch):
    passed: list[list[bool]] = []
    monkeypatch.setattr(
        RejectionSampler, "__call__", lambda *arguments: passed.append(arguments[4].tolist())
    )
    batch: Any = SimpleNamespace(
        # Three rows of request 1, three of request 2; the first row of each verifies no draft.
        expanded_idx_mapping=torch.tensor([1, 1, 1, 2, 2, 2]),
        expanded_local_pos=torch.tensor([0, 1, 2, 0, 1, 2]),
    )
    read: list[torch.Tensor] = []
    adapter: Any = SimpleNamespace(
        num_drafted=torch.tensor([9, 2, 0]),
        is_drafting=True,
        resume=lambda part, logits: read.append(logits),
    )
    sampler, logits = make_sampler(DraftedOnly, adapter), torch.empty(6, 4)
    theirs = [False, False, True, False, False, False]
    sampler(logits, batch, None, None)
    sampler(logits, batch, None, torch.tensor(theirs))
    assert read == [logits] * 2
    adapter.is_drafting = False  # vLLM's warm-up, which nothing of the plugin may stop
    sampler(logits, batch, None, torch.tensor(theirs))
    fillers = [False, False, False, False, True, True]
    assert passed == [fillers, [False, False, True, False, True, True], theirs]


class Watching(StepObserver):
    """Notes what observers are told, and the nodes of trees."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def begun(self, requests: Any) -> None:
        self.told.append(("begun", [request.req_id for request in requests]))

    def ended(self, step: Any, new_tokens: Any, stats: Any) -> None:
        nodes = [tree.token_list for tree in step.trees]
        self.told.append(("ended", new_tokens, nodes, step.accepted))

    def drafted(self, request_ids: Any, drafts: Any, has_failed: Any) -> None:
        nodes = {name: tree.token_list for name, (_, tree) in drafts.items()}
        self.told.append(("drafted", request_ids, nodes))

    def released(self, request_id: str) -> None:
        self.told.append(("released", request_id))


def test_observers_are_told_of_steps(steps):
    watching = Watching()
    steps.adapter.trees.observers = [watching]
    for name in "ab":
        steps.add(name, [1, 3])
    steps.step({"a": [6], "b": [6]})
    steps.step({"a": [7, 8, 9], "b": [7]}, WIDTH)
    steps.adapter.release(["a", "b"])
    drafts = [7, 8, 9, 10]
    assert watching.told == [
        ("begun", ["a"]),
        ("begun", ["b"]),
        ("ended", [[6], [6]], [[], []], [[], []]),
        ("drafted", ["a", "b"], {"a": drafts, "b": drafts}),
        ("ended", [[7, 8, 9], [7]], [drafts, drafts], [[0, 1], []]),
        ("drafted", ["a", "b"], {"a": [10], "b": [8, 9, 10]}),
        ("released", "a"),
        ("released", "b"),
    ]


# -- steps that are launched ahead of their drafts -------------------------------------------------


class Ahead(Steps):
    """Steps that are scheduled before anything is read of the one before.

    Attributes:
        device_waits: Planned places of each step that was launched ahead.
        taken: The drafts that the device has where it verifies a step.
    """

    def __init__(self, launches_ahead: bool, drafter: Drafter | None = None) -> None:
        drafter = drafter or NextNumbers()
        drafter.needs_hidden_states = False
        super().__init__(drafter, launches_ahead=launches_ahead)
        self.device_waits: list[dict[str, int]] = []
        plan = self.adapter._plan

        def noted(output: Any) -> Any:
            lengths = plan(output)
            if lengths is not None:
                self.device_waits.append(lengths)
            return lengths

        self.adapter._plan = noted  # type: ignore[method-assign]

    def verify(self, batch: Any) -> None:
        self.taken = {name: self.on_the_device(name) for name in batch.req_ids}

    def run(self, *steps: dict[str, list[int]]) -> list[Any]:
        """What the drafter and the device get of each step."""
        seen = []
        for sampled in steps:
            self.drafter.requests = []
            self.run_step(sampled, scheduled=WIDTH if self.adapter._in_flight.last else 0)
            read = [(r.request_id, r.token_ids.tolist()) for r in self.drafter.requests]
            kept = [i for i in sampled if self.fillers.get(i, WIDTH) < WIDTH]
            seen.append((read, {i: self.taken[i] for i in kept}, dict(self.fillers)))
        return seen


TOKENS = [
    {"a": [11], "b": [21], "c": [35]},
    {"a": [12, 13, 9], "b": [22], "c": [36]},
    {"a": [3], "c": [37, 38, 39, 40, 6]},  # b is preempted
    {"a": [4, 5, 11], "c": [7]},
    {"a": [12, EOS, 3], "c": [8, 9, 10, 11]},  # a has ended
    {"a": [16], "c": [12]},
    {"c": [13, 14]},
]


def test_steps_ahead_of_their_drafts_get_the_same_drafts(steps):
    runs = []
    for launches_ahead in (False, True):
        ahead = Ahead(launches_ahead)
        for name in "abc":
            ahead.add(name, [7, 8], **({"ignore_eos": True} if name == "c" else {}))
        seen = ahead.run(*TOKENS)
        assert len(ahead.device_waits) == (6 if launches_ahead else 0)
        ahead.adapter.draft()
        stats = ahead.statistics()
        texts = {
            name: text.token_ids[: text.num_tokens].tolist()
            for name, text in ahead.adapter._requests.items()
        }
        runs.append((seen, texts, stats.steps, stats.tokens, stats.waits))
    assert runs[0] == runs[1]
    assert runs[0][0][1][1] == {"a": [12, 13, 14, 15], "b": [22, 23, 24, 25]}


def test_a_step_ahead_is_launched_before_anything_is_waited_for(steps, monkeypatch):
    events: list[str] = []
    ahead = Ahead(True)
    ahead.adapter._device = SimpleNamespace(type="device")  # which computes later than it is told
    delivery = ahead.adapter._delivery
    for name in ("send", "reserve", "launch", "deliver"):
        stock = getattr(delivery, name)
        monkeypatch.setattr(
            delivery, name, lambda *a, name=name, stock=stock: (events.append(name), stock(*a))
        )
    monkeypatch.setattr(Event, "synchronize", lambda self: events.append("wait"))
    verify = ahead.verify
    monkeypatch.setattr(ahead, "verify", lambda batch: (events.append("verify"), verify(batch)))
    propose = ahead.drafter.propose
    ahead.drafter.propose = lambda requests: (events.append("draft"), propose(requests))[1]
    ahead.add("a", [7, 8])
    ahead.run({"a": [11]}, {"a": [12, 13, 9]}, {"a": [10]})
    launched = ["reserve", "launch", "verify", "wait", "draft", "deliver"]
    assert events == ["verify", *launched, *launched]
    ahead.drafter.propose = propose
    # The last kernel ran before its drafts were there, so it gave up and took none.
    assert ahead.taken == {"a": []}
    assert ahead.adapter.launches_ahead


class Preparing(NextNumbers):
    """Prepares its drafts, and fails at that where it is told to.

    Attributes:
        fault: Where it fails.
        prepared: Batches whose drafts reached the device early.
    """

    needs_hidden_states = False
    fault = ""
    prepared = 0

    def prepare(
        self, requests: Sequence[DraftRequest], rows: Sequence[int], num_new: int
    ) -> PreparedDrafts | None:
        self.fail("prepare")
        drafter, texts = self, [request.token_ids for request in requests]

        class Drafts(PreparedDrafts):
            request_ids = tuple(request.request_id for request in requests)

            def draft(self, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
                drafter.fail("draft")
                new = [tokens[row, : counts[row]] for row in rows]
                longer = [
                    replace(request, token_ids=np.append(text, some).astype(np.int32))
                    for request, text, some in zip(requests, texts, new, strict=True)
                ]
                trees = NextNumbers.propose(drafter, longer)
                chains = np.full((len(trees), WIDTH), -1)
                for chain, tree in zip(chains, trees, strict=True):
                    chain[: tree.num_nodes] = tree.token_ids
                if drafter.fault == "vocabulary":
                    chains[:, 0] = VOCAB
                drafter.prepared += 1
                lengths = np.array([tree.num_nodes for tree in trees])
                if drafter.fault == "wide":
                    chains = np.pad(chains, [(0, 0), (0, 3)])
                if drafter.fault in ("short", "long"):
                    lengths += -9 if drafter.fault == "short" else 9
                return lengths, chains[1:] if drafter.fault == "few" else chains

            def trees(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
                drafter.fail("trees")
                return drafter.propose(requests)

        return Drafts()

    def fail(self, place: str) -> None:
        if self.fault == place:
            raise RuntimeError(place)


class OfOne(DraftSource):
    """Has drafts for one request."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def may_extend(self, request: DraftRequest) -> bool:
        return request.request_id == self._request_id


@pytest.mark.parametrize(
    "fault", ["", "prepare", "draft", "vocabulary", "wide", "short", "long", "few", "source"]
)
def test_drafts_that_were_prepared_are_those_of_the_drafter(steps, fault):
    """Where that fails, drafting begins again; beside requests of another source it always does."""
    runs, early = [], []
    for drafter in (NextNumbers(), Preparing()):
        drafter.fault = fault  # type: ignore[attr-defined]
        ahead = Ahead(True, drafter)
        guard: Any = ahead.adapter.trees.guard
        guard.sources = [OfOne("c" if fault == "source" else "nobody")]
        draft = guard.draft_prepared
        guard.draft_prepared = lambda *a, draft=draft: (early.append(draft(*a)), early[-1])[1]
        for name in "abc":
            ahead.add(name, [7, 8], **({"ignore_eos": True} if name == "c" else {}))
        runs.append(ahead.run(*TOKENS))
        assert not any(guard.failures.values())
    assert runs[0] == runs[1]
    assert (None in early) == (fault in ("draft", "vocabulary", "short", "long", "few"))
    num_prepared = 0 if fault in ("prepare", "draft", "source") else 6
    assert drafter.prepared == num_prepared  # type: ignore[attr-defined]


def test_a_drafter_that_loses_its_prepared_drafts_costs_them_alone(steps):
    """The device has them already: the host counts no draft, and outputs are what was sampled."""
    drafter = Preparing()
    drafter.fault = "trees"
    ahead = Ahead(True, drafter)
    ahead.add("a", [7, 8])
    ahead.run({"a": [11]}, {"a": [12, 13, 9]}, {"a": [10]})
    ahead.adapter.draft()
    assert ahead.adapter.trees.guard.failures["error"] == 1
    text = ahead.adapter._requests["a"]
    assert text.token_ids[: text.num_tokens].tolist() == [7, 8, 11, 12, 13, 9, 10]


def test_a_request_that_missed_a_step_has_no_prepared_draft(steps):
    """The device gets zeros for it; the host counts none either."""
    ahead = Ahead(True, Preparing())
    for name in "ab":
        ahead.add(name, [7, 8])
    ahead.run({"a": [11], "b": [21]})
    ahead.run_step({"a": [14]})  # beside a prefill: drafts come first
    assert ahead.row_of("b") == [22, 23, 24, 25]
    [(_, taken, fillers)] = ahead.run({"a": [10], "b": [22]})
    assert taken == {"a": [15]}
    assert fillers == {"a": WIDTH - 1, "b": WIDTH}
    assert ahead.run({"a": [11], "b": [23]})[0][1] == {"b": [23, 24, 25]}


class Recycled(Ahead):
    """Texts that repeat themselves, verified with random rows of logits."""

    def __init__(self, prepares: bool) -> None:
        context = replace(make_context(), vocab_size=VOCAB)
        options = NgramTrieDrafter.Options(recycle=True, max_context_len=3)
        drafter = NgramTrieDrafter(options, context)
        if not prepares:
            drafter.prepare = lambda *unused: None  # type: ignore[method-assign,assignment]
        super().__init__(True, drafter)
        self.rng = random.Random(5)
        self.answers: dict[str, list[int]] = {}
        self.sampled: dict[str, list[int]] = {}
        self.drafted = self.num_prepared = 0
        draft = self.adapter.trees.guard.draft_prepared

        def counted(*arguments: Any) -> Any:
            self.num_prepared += 1
            return draft(*arguments)

        self.adapter.trees.guard.draft_prepared = counted  # type: ignore[method-assign]

    def verify(self, batch: Any) -> None:
        super().verify(batch)
        rows = [[self.rng.sample(range(30), 8)] for _ in range(int(batch.cu_num_logits_np[-1]))]
        self.adapter.resume("logits", torch.tensor(rows))
        for name, new in self.sampled.items():
            answer, draft = self.answers[name], self.taken[name]
            pairs = takewhile(lambda pair: pair[0] == pair[1], zip(draft, answer, strict=False))
            size = 1 + len(list(pairs))
            new[:] = answer[:size]
            del answer[:size]
            self.drafted += len(draft)

    def go_on(self, num_steps: int) -> list[Any]:
        seen = []
        for _ in range(num_steps):
            self.sampled = {
                name: [] for name, answer in self.answers.items() if len(answer) > WIDTH
            }
            self.run_step(self.sampled, scheduled=WIDTH if self.adapter._in_flight.last else 0)
            seen.append((dict(self.sampled), {name: self.taken[name] for name in self.sampled}))
        return seen


def test_the_texts_drafts_are_the_same_if_they_were_prepared(steps, monkeypatch):
    """Samples of a prompt, with rows of logits, a request without drafts, one that starts again."""

    def first_tokens(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = rows.flatten(1).int().contiguous()
        return tokens, torch.softmax(-tokens.float(), dim=-1)

    monkeypatch.setattr(v2_adapter, "likeliest_on_device", first_tokens)
    monkeypatch.setitem(globals(), "MAX_MODEL_LEN", 400)
    runs, numbers = [], []
    for prepares in (True, False):
        run = Recycled(prepares)
        rng = random.Random(3)
        for name in ("0_x", "1_x", "a", "b", "never"):
            extra = {"extra_args": {"speculation": False}} if name == "never" else {}
            run.add(name, [7, 8, 9, 7, 8], max_tokens=300, ignore_eos=True, **extra)
            pieces = [[rng.randrange(30) for _ in range(5)] for _ in range(4)]
            run.answers[name] = [token for _ in range(40) for token in rng.choice(pieces)]
        seen = run.go_on(12)
        text = run.adapter._requests["a"]
        tokens = text.token_ids[: text.num_tokens].tolist()
        run.add("a", tokens, num_output=len(tokens) - 5, max_tokens=300, ignore_eos=True)
        seen += run.go_on(12)
        assert run.drafted > 100
        runs.append(seen)
        numbers.append(run.num_prepared)
    assert runs[0] == runs[1]
    assert numbers[0] > 15
    assert numbers[1] == 0


def test_rows_of_logits_of_other_weights_are_forgotten(steps, monkeypatch):
    """After a pause that keeps requests, the last step's are not taken in yet."""
    monkeypatch.setattr(
        v2_adapter,
        "likeliest_on_device",
        lambda rows: (rows.flatten(1).int().contiguous(), rows.flatten(1).float()),
    )
    monkeypatch.setitem(globals(), "MAX_MODEL_LEN", 400)
    run = Recycled(prepares=False)
    run.add("a", [7, 8, 9, 7, 8], max_tokens=300, ignore_eos=True)
    run.answers["a"] = [7, 8, 9, 5] * 40
    seen: list[bool] = []
    propose = run.drafter.propose
    run.drafter.propose = lambda requests: (
        seen.append(requests[0].rows is not None),
        propose(requests),
    )[1]
    run.go_on(4)
    run.adapter.forget_rows()
    run.go_on(2)
    assert seen == [True, True, True, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"has_structured_output_requests": True},
        {"total_num_scheduled_tokens": 9},  # a prefill, or beams
        {"scheduled_spec_decode_tokens": {}},
    ],
)
def test_steps_whose_drafts_come_first(steps, change):
    ahead = Ahead(True)
    ahead.add("a", [7, 8])
    ahead.run({"a": [11]}, {"a": [12, 9]})
    output = SimpleNamespace(
        has_structured_output_requests=False,
        total_num_scheduled_tokens=1 + WIDTH,
        scheduled_spec_decode_tokens={"a": [-1] * WIDTH},
    )
    assert ahead.adapter._plan(output) == {"a": WIDTH}
    assert ahead.adapter._plan(SimpleNamespace(**{**vars(output), **change})) is None
    ahead.drafter.needs_hidden_states = True
    assert ahead.adapter._plan(output) is None


def test_a_pause_ends_with_a_step_ahead_of_its_drafts(steps):
    ahead = Ahead(True)
    budget = ahead.adapter.trees.budget = Pausing()
    ahead.add("a", [7, 8])
    ahead.run({"a": [11]}, {"a": [12, 9]})
    budget.pauses = True
    ahead.run({"a": [10]}, {"a": [11]}, {"a": [12]})
    num_ahead = len(ahead.device_waits)
    num_waits = Event.waits
    budget.pauses = False
    ahead.run({"a": [13]})
    assert (len(ahead.device_waits), Event.waits) == (num_ahead, num_waits)
    ahead.run({"a": [14, 15, 3]})
    assert (len(ahead.device_waits), Event.waits) == (num_ahead + 1, num_waits + 1)


def test_a_request_that_ends_in_a_pause_is_released_with_its_last_token(steps, monkeypatch):
    """The first step after the pause is launched ahead of its drafts."""
    ahead = Ahead(True)
    budget = ahead.adapter.trees.budget = Pausing()
    for name in "ab":
        ahead.add(name, [7, 8], ignore_eos=True)
    ahead.run({"a": [11], "b": [11]}, {"a": [12, 9], "b": [12, 9]})
    budget.pauses = True
    ahead.run({"a": [10], "b": [10]}, {"a": [11], "b": [11]}, {"a": [12], "b": [3]})
    Event.has_arrived = True
    budget.pauses = False
    ahead.run({"a": [13]})
    resume = ahead.adapter.resume

    def released(part: Any, *made: Any) -> Any:
        if part == "requests":  # vLLM has taken b out of its batch
            ahead.adapter.release(["b"])
        return resume(part, *made)

    monkeypatch.setattr(ahead.adapter, "resume", released)
    num_ahead = len(ahead.device_waits)
    ahead.run({"a": [14]})
    assert len(ahead.device_waits) == num_ahead + 1
    assert ahead.drafter.ended == {"b": [11, 12, 9, 10, 11, 3]}


def test_a_request_that_ends_in_a_step_ahead_has_no_rejected_draft(steps):
    """vLLM takes it out of its batch before the host reads the step that verified its draft."""
    ahead = Ahead(True)
    budget = ahead.adapter.trees.budget = NodeBudget()
    judged: list[list[int]] = []
    budget.observe_verified = lambda trees, accepted: judged.append(  # type: ignore[method-assign]
        [tree.num_nodes for tree in trees]
    )
    for name in "ab":
        ahead.add(name, [7, 8])
    ahead.run({"a": [11], "b": [21]}, {"a": [12, 9], "b": [22, 9]})
    resume = ahead.adapter.resume

    def ends(part: Any, *made: Any) -> Any:
        if part == "requests":
            ahead.adapter.release(["b"])
        return resume(part, *made)

    ahead.adapter.resume = ends  # type: ignore[method-assign]
    ahead.run({"a": [10]})
    assert len(ahead.device_waits) == 2
    assert judged[-1] == [WIDTH, 0]
    assert ahead.statistics().tokens == 1 + 1 + 2


def test_nothing_is_launched_ahead_where_the_device_gives_up(steps, monkeypatch):
    """Three times in a row: for ten minutes, as the host may only have stopped for a moment, then
    for an hour, as something may wait each time."""
    ahead = Ahead(True)
    ahead.adapter._device = SimpleNamespace(type="device")
    ahead.add("a", [7, 8])
    run = [{"a": [token]} for token in (11, 12, 13, 14, 16, 17, 18)]
    ahead.run(*run)
    assert len(ahead.device_waits) == 4
    assert not ahead.adapter.launches_ahead
    assert ahead.taken == {"a": [18, 19, 20]}
    text = ahead.adapter._requests["a"]
    assert text.token_ids[2 : text.num_tokens].tolist() == [11, 12, 13, 14, 16, 17]
    later = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: later)
    ahead.run(*[{"a": [token]} for token in (19, 20, 21, 22, 23)])
    num_waits = len(ahead.device_waits)
    assert num_waits > 4
    assert not ahead.adapter.launches_ahead
    monkeypatch.setattr(time, "monotonic", lambda: later + 3599)
    assert not ahead.adapter.launches_ahead
    monkeypatch.setattr(time, "monotonic", lambda: later + 3601)
    assert ahead.adapter.launches_ahead
