"""A scheduler of vLLM with a worker that computes nothing but checks everything.

The worker follows the protocol of vLLM's model runner: what it knows of a request is what the
scheduler has sent. Its KV cache holds, per slot, a fingerprint of all tokens up to that slot, and a
row is only computed after every slot of its context was found right. So a wrong fork, a lost copy,
a block given back too early or a token that the worker does not know fail at once, and thousands of
requests run in seconds. Its language model is a random function of the prefix.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_trie.hooks.wire import SEARCH_KEY
from vllm_trie.searches import BeamSearch, Candidates
from vllm_trie.searches.engine.frontend.requests import _parsed, _prepared
from vllm_trie.searches.engine.scheduler.beam_scheduler import (
    AsyncTrieBeamScheduler,
    TrieBeamScheduler,
)
from vllm_trie.searches.engine.search_wire import (
    BEAM_STEPS,
    CANDIDATES,
    SELECTIONS,
    BeamStep,
    TokenSelection,
    beam_spec,
    search_settings,
)

VOCAB = 24
EOS = 0


@lru_cache(maxsize=200_000)
def next_logprobs(fingerprint: int) -> np.ndarray:
    """float32[VOCAB]: the model, a function of the prefix."""
    logits = np.random.default_rng(fingerprint & 0xFFFFFFFFFFFF).normal(scale=1.5, size=VOCAB)
    logits[EOS] += 0.8
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


START = 17
"""The fingerprint of no tokens."""


def fingerprints(token_ids: list[int]) -> list[int]:
    """A number per token that depends on it and all tokens before it."""
    result, value = [], START
    for token in token_ids:
        value = hash((value, token))
        result.append(value)
    return result


@dataclass
class WorkerRequest:
    """What the worker knows of a request; its blocks are by KV cache group."""

    token_ids: list[int]
    block_ids: list[list[int]]
    num_prompt_tokens: int
    num_logprobs: int | None


@dataclass
class Chain:
    """Beams of a group whose children the worker chooses, by place.

    Attributes:
        tokens: what they compute.
        blocks: by KV cache group, their block tables behind the prompt's full blocks.
        places: the place of each beam in the order of the search.
        totals: float32 [beams], in that order.
        children: in that order, token, place, and place of the parent.
    """

    tokens: list[int]
    blocks: list[list[list[int]]]
    places: list[int]
    totals: np.ndarray | None = None
    children: list[tuple[int, int, int]] = field(default_factory=list)


class Worker:
    """Checks what a scheduler sends, and answers. It keeps the tokens that it samples, as Model
    Runner V2 does; of a resumed request it takes the scheduler's.

    Args:
        block_size: Of all KV cache groups.
        windows: The tokens that each group's layers attend to.
    """

    def __init__(self, block_size: int, windows: list[int]) -> None:
        self.block_size, self.windows = block_size, windows
        self.requests: dict[str, WorkerRequest] = {}
        self.slots: dict[int, int] = {}
        self.before: dict[int, int] = {}  # fingerprint -> that of one token less
        self.chains: dict[str, Chain] = {}
        self.computed_tokens = 0

    def execute(self, output: Any) -> ModelRunnerOutput:
        """Run one step."""
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
            self.chains.pop(request_id, None)
        for copied in output.kv_cache_block_copies or []:
            for offset in range(self.block_size):
                source = self.slots.get(copied.src_block_id * self.block_size + offset)
                if source is not None:
                    self.slots[copied.dst_block_id * self.block_size + offset] = source
        scheduled = output.num_scheduled_tokens
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests, f"{new.req_id} is known already"
            assert new.prompt_token_ids is not None
            self.requests[new.req_id] = WorkerRequest(
                [int(token) for token in new.prompt_token_ids],
                [list(block_ids) for block_ids in new.block_ids],
                len(new.prompt_token_ids),
                new.sampling_params.logprobs,
            )
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            assert request_id in self.requests, f"the worker does not know {request_id}"
            state = self.requests[request_id]
            num_output_tokens = cached.num_output_tokens[i]
            if request_id in cached.resumed_req_ids:
                state.token_ids = list(cached.all_token_ids[request_id])
            del state.token_ids[state.num_prompt_tokens + num_output_tokens :]
            if request_id in cached.resumed_req_ids:
                state.block_ids = [list(block_ids) for block_ids in cached.new_block_ids[i]]
            elif cached.new_block_ids[i] is not None:
                for block_ids, more in zip(state.block_ids, cached.new_block_ids[i], strict=True):
                    block_ids += more
            starts[request_id] = cached.num_computed_tokens[i]
        assert starts.keys() == scheduled.keys()

        sampled: list[list[int]] = []
        rows: list[np.ndarray] = []
        for request_id, count in scheduled.items():
            state = self.requests[request_id]
            start, end = starts[request_id], starts[request_id] + count
            assert end <= len(state.token_ids), f"{request_id}: unknown tokens are scheduled"
            inputs = state.token_ids[:end]
            prints = fingerprints(inputs)
            self.before.update(zip(prints, [START, *prints], strict=False))
            for block_ids, window in zip(state.block_ids, self.windows, strict=True):
                for position in range(max(0, start + 1 - window), end):
                    slot = self._slot(block_ids, position)
                    if position >= start:
                        self.slots[slot] = prints[position]
                    stored = self.slots.get(slot)
                    assert stored == prints[position], f"{request_id}: wrong KV at {position}"
            self.computed_tokens += count
            rows.append(next_logprobs(prints[-1]))
            if end == len(state.token_ids):
                token = int(rows[-1].argmax())
                state.token_ids.append(token)
                sampled.append([token])
            else:
                sampled.append([])  # a chunk of the prompt
        result = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={request_id: i for i, request_id in enumerate(scheduled)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(list(scheduled), sampled, rows),
        )
        beams = {step.proxy_id: self._decode(step) for step in getattr(output, BEAM_STEPS, ())}
        num_beams = sum(map(len, beams.values()))
        assert output.total_num_scheduled_tokens == sum(scheduled.values()) + num_beams
        places = {request_id: i for i, request_id in enumerate(scheduled)}
        selected = {}
        for step in getattr(output, SELECTIONS, []):
            logprobs = beams.get(step.proxy_id)
            if logprobs is None:
                logprobs = rows[places[step.proxy_id]][None]
            if step.stop_token_ids is None:
                selected[step.proxy_id] = _selected(step, logprobs)
            else:
                selected[step.proxy_id] = self._choose(step, logprobs)
        setattr(result, CANDIDATES, selected)
        return result

    def _slot(self, block_ids: list[int], position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return block_ids[block] * self.block_size + offset

    def _decode(self, step: BeamStep) -> np.ndarray:
        """Compute a token of each beam of a group.

        A beam's tokens are known by its KV alone: each slot must follow on the one before.
        """
        state = self.requests[step.proxy_id]
        assert state.token_ids[: step.prompt_len] == state.token_ids[: state.num_prompt_tokens]
        prompt = fingerprints(state.token_ids[: step.prompt_len])[-1]
        suffixes = [suffix.tolist() for suffix in step.suffix]
        if step.token_ids is None:
            self._go_on(self.chains[step.proxy_id], suffixes)
        else:
            tokens = step.token_ids.tolist()
            self.chains[step.proxy_id] = Chain(tokens, suffixes, [*range(len(tokens))])
        chain = self.chains[step.proxy_id]
        logprobs, written = [], set()
        for token, *blocks in zip(chain.tokens, *chain.blocks, strict=True):
            pairs = zip(step.shared, blocks, strict=True)
            tables = [[*shared.tolist(), *suffix] for shared, suffix in pairs]
            contents, value = [], START
            for position in range(step.num_computed):
                content = self.slots.get(self._slot(tables[0], position))
                follows = content is not None and self.before.get(content) == value
                assert follows, f"{step.proxy_id}: wrong KV at {position}"
                contents.append(value := content)
                assert position != step.prompt_len - 1 or value == prompt, "another prompt's KV"
            after = hash((value, token))
            for table, window in zip(tables, self.windows, strict=True):
                for position in range(max(0, step.num_computed + 1 - window), step.num_computed):
                    stored = self.slots.get(self._slot(table, position))
                    assert stored == contents[position], f"{step.proxy_id}: wrong KV at {position}"
                slot = self._slot(table, step.num_computed)
                assert slot not in written, f"{step.proxy_id}: two beams write one slot"
                written.add(slot)
                self.slots[slot] = after
            self.before[after] = value
            logprobs.append(next_logprobs(after))
        self.computed_tokens += len(logprobs)
        return np.stack(logprobs)

    def _choose(self, step: TokenSelection, logprobs: np.ndarray) -> Candidates:
        """Choose the children of a group, before the scheduler hears of the candidates."""
        chain = self.chains[step.proxy_id]
        totals = chain.totals if step.totals is None else step.totals
        candidates = _selected(step._replace(totals=totals), logprobs[chain.places])
        scores = candidates.logprobs + totals[candidates.rows]
        order = [
            i
            for i in np.argsort(-scores, kind="stable")
            if candidates.token_ids[i] not in step.stop_token_ids
        ]
        chosen = order[: len(chain.places)]
        assert len(chosen) == len(chain.places)
        parents = candidates.rows[chosen].tolist()
        spare = [place for rank, place in enumerate(chain.places) if rank not in parents]
        children, stayed = [], set()
        for parent, token in zip(parents, candidates.token_ids[chosen].tolist(), strict=True):
            source = chain.places[parent]
            children.append((token, spare.pop(0) if parent in stayed else source, source))
            stayed.add(parent)
        chain.children, chain.totals = children, scores[chosen]
        return candidates

    def _go_on(self, chain: Chain, fresh: list[list[list[int]]]) -> None:
        """Put the children of a group in the place of the beams."""
        for blocks, tails in zip(chain.blocks, fresh, strict=True):
            old = [*blocks]
            for (_, place, source), tail in zip(chain.children, tails, strict=True):
                for offset in range(0 if tail or place == source else self.block_size):
                    content = self.slots.get(old[source][-1] * self.block_size + offset)
                    if content is not None:
                        self.slots[old[place][-1] * self.block_size + offset] = content
                blocks[place] = (
                    [*old[source], *tail] if tail else [*old[source][:-1], old[place][-1]]
                )
        for token, place, _ in chain.children:
            chain.tokens[place] = token
        chain.places = [place for _, place, _ in chain.children]

    def _logprobs(
        self, request_ids: list[str], sampled: list[list[int]], rows: list[np.ndarray]
    ) -> LogprobsLists | None:
        counts = [self.requests[request_id].num_logprobs or 0 for request_id in request_ids]
        if not any(counts):
            return None
        values = np.stack(rows)
        first = np.array([tokens[0] if tokens else 0 for tokens in sampled])[:, None]
        order = np.argsort(-values, axis=1, kind="stable")
        token_ids = np.concatenate([first, order], axis=1)
        logprobs = np.take_along_axis(values, token_ids, axis=1)
        return LogprobsLists(
            token_ids.astype(np.int32), logprobs, np.zeros(len(request_ids), dtype=np.int64), None
        )


def _selected(step: TokenSelection, logprobs: np.ndarray) -> Candidates:
    """Return no more candidates than are asked for, by row, best first."""
    token_ids = np.argsort(-logprobs, axis=1, kind="stable")
    values = np.take_along_axis(logprobs, token_ids, axis=1)
    if step.totals is None:
        kept = slice(0, step.num_candidates)
        return Candidates.of_rows(token_ids[:, kept], values[:, kept])
    candidates = Candidates.of_rows(token_ids, values)
    scores = values.ravel() + step.totals[candidates.rows]
    best = np.sort(np.argsort(-scores, kind="stable")[: step.num_candidates])
    return Candidates(*(column[best] for column in candidates[:3]))


@dataclass
class Finished:
    """A request's output."""

    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    hypotheses: list[tuple[list[int], float]] = field(default_factory=list)
    events: list[EngineCoreEventType] = field(default_factory=list)


class Simulation:
    """A scheduler, a worker and vLLM's engine loop, with or without asynchronous scheduling.

    With ``asynchronous="device"`` the worker chooses the children of plain searches, as on Model
    Runner V2. With `max_loras` each request has an adapter: there is one more than that. With
    `window` there are layers with a sliding window, in a KV cache group of their own.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        prefix_caching: bool = True,
        asynchronous: bool | str = False,
        policy: str = "fcfs",
        overcommit: bool = False,
        max_loras: int | None = None,
        window: int | None = None,
    ) -> None:
        config = copy.deepcopy(vllm_config)
        config.scheduler_config.max_num_seqs = max_num_seqs
        config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
        config.scheduler_config.max_num_scheduled_tokens = max_num_batched_tokens
        config.scheduler_config.policy = policy
        config.scheduler_config.async_scheduling = bool(asynchronous)
        config.lora_config = None if max_loras is None else LoRAConfig(max_loras=max_loras)
        config.cache_config.enable_prefix_caching = prefix_caching
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = block_size
        sizes = {
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        specs: list[Any] = [FullAttentionSpec(**sizes)]
        if window is not None:
            specs.append(SlidingWindowSpec(sliding_window=window, **sizes))
        config.model_config.max_model_len = (num_blocks - 1) // len(specs) * block_size
        kv_cache_config = KVCacheConfig(
            num_blocks, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        )
        scheduler_class = AsyncTrieBeamScheduler if asynchronous else TrieBeamScheduler
        init_none_hash(sha256)
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
            include_finished_set=True,
        )
        groups = self.scheduler.beam_groups
        on_device = asynchronous == "device"
        groups.engine = groups.engine._replace(vocab_size=VOCAB, on_device=on_device)
        self._hasher = get_request_block_hasher(block_size, sha256) if prefix_caching else None
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._depth = 2 if asynchronous else 1
        self.worker = Worker(block_size, [1 << 30] if window is None else [1 << 30, window])
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.finished: dict[str, Finished] = {}
        self.open: set[str] = set()
        self.unreported: set[str] = set()  # that clients have not been told to forget
        self.peak_blocks = 0
        self._clock = 0.0
        self._adapters = cycle(
            [None]
            if max_loras is None
            else [LoRARequest(f"adapter{i}", i, "nowhere") for i in range(1, max_loras + 2)]
        )
        if overcommit:  # admit groups whatever runs: they will fight for blocks
            vars(groups.admission)["expected_blocks"] = lambda group: 0

    def add_beam(
        self, name: str, prompt: list[int], width: int, n: int, priority: int = 0, **options: Any
    ) -> str:
        """Add a beam request."""
        params = SamplingParams(
            n=n,
            temperature=0.0,
            max_tokens=options.pop("max_tokens", 8),
            min_tokens=options.pop("min_tokens", 0),
            extra_args={"beam_width": width, **options},
        )
        self._clock += 1
        self._add(name, prompt, prepare_params(params), priority)
        return name

    def add_greedy(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 8,
        priority: int = 0,
        ignore_eos: bool = False,
    ) -> str:
        """Add an ordinary request."""
        self._clock += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        self._add(name, prompt, params, priority)
        return name

    def _add(
        self, request_id: str, prompt: list[int], params: SamplingParams, priority: int
    ) -> None:
        params._eos_token_id = None if params.ignore_eos else EOS
        self.open.add(request_id)
        self.unreported.add(request_id)
        self.scheduler.add_request(
            Request(
                request_id,
                list(prompt),
                params,
                None,
                arrival_time=self._clock,
                trace_headers={"request": request_id},
                priority=priority,
                lora_request=next(self._adapters),
                block_hasher=self._hasher,
            )
        )

    def abort(self, request_id: str) -> None:
        """Abort as the engine does when a client goes away."""
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        self.scheduler.check_integrity()
        self.open.discard(request_id)

    def step(self) -> None:
        """One turn of the engine's loop."""
        assert self.scheduler.has_requests() or self._queue
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.scheduler.check_integrity()
            self.peak_blocks = max(
                self.peak_blocks,
                self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks(),
            )
            # The scheduler may change its lists before the worker would have run.
            self._queue.append((output, self.worker.execute(pickle.loads(pickle.dumps(output)))))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._queue) < self._depth and (executed or self.scheduler.has_requests()):
                return
        output, result = self._queue.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            self.unreported -= outputs.finished_requests or set()
            for request_output in outputs.outputs:
                self._take(request_output)
        self.scheduler.check_integrity()

    def _take(self, output: Any) -> None:
        assert output.request_id in self.open, f"{output.request_id} has finished already"
        entry = self.finished.setdefault(output.request_id, Finished())
        entry.token_ids += output.new_token_ids
        entry.events += [event.type for event in output.events or ()]
        if output.finish_reason is not None:
            assert output.trace_headers == {"request": output.request_id}
            entry.reason = str(output.finish_reason)
            self.open.discard(output.request_id)
            self.finished[output.request_id] = self.finished.pop(output.request_id)  # in order
        if carried := output.kv_transfer_params:
            rest, answer = iter(entry.token_ids), carried[SEARCH_KEY]
            assert answer.report["steps"] == answer.shared["steps"] > 0
            assert 0 <= answer.report["waiting_seconds"] < 3600
            for hypothesis in answer.hypotheses:
                token_ids = [*islice(rest, hypothesis.num_tokens)]
                entry.hypotheses.append((token_ids, hypothesis.beam["score"]))
            assert next(rest, None) is None

    def run(self, max_steps: int = 20_000) -> None:
        """Run until nothing is left.

        Raises:
            AssertionError: It takes more than `max_steps`.
        """
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._queue:
                assert not self.open, f"never finished: {sorted(self.open)[:5]}"
                return
            self.step()
        raise AssertionError(f"still running after {max_steps} steps: {sorted(self.open)[:5]}")

    def check_clean(self) -> None:
        """Nothing is left of any request: no block, no bookkeeping."""
        scheduler = self.scheduler
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert scheduler.beam_groups.idle
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not manager.req_to_blocks
            assert not manager.num_cached_block
            assert not manager._pending_cow_copies
        assert scheduler.max_num_active_reqs == scheduler.beam_groups.admission.slots
        assert not self.unreported
        assert not self.worker.requests
        assert not self.worker.chains


def prepare_params(params: SamplingParams) -> SamplingParams:
    """What the front end makes of a beam request whose engine can serve it."""
    return _prepared(params, *_parsed(params))


def expected_beam(prompt: list[int], width: int, **options: Any) -> list[tuple[list[int], float]]:
    """What the pure algorithm finds on the simulated model."""
    params = SamplingParams(
        max_tokens=options.pop("max_tokens", 8), extra_args={"beam_width": width, **options}
    )
    spec = beam_spec(prepare_params(params))
    params._eos_token_id = EOS
    search = BeamSearch(search_settings(params, spec, params.max_tokens), prompt)
    rows: list[list[int]] = [[]]
    while not search.done:
        logprobs = np.stack([next_logprobs(fingerprints([*prompt, *row])[-1]) for row in rows])
        token_ids = np.argsort(-logprobs, axis=1, kind="stable")
        logprobs = np.take_along_axis(logprobs, token_ids, axis=1)
        search.advance(Candidates.of_rows(token_ids, logprobs))
        rows = search.generated.tolist()
    return [(hypothesis.token_ids, hypothesis.score) for hypothesis in search.hypotheses()]


def expected_greedy(prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Greedy decoding on the simulated model."""
    generated: list[int] = []
    while len(generated) < max_tokens and (not generated or generated[-1] != EOS):
        generated.append(int(next_logprobs(fingerprints([*prompt, *generated])[-1]).argmax()))
    return generated


def random_run(vllm_config: Any, seed: int, num_requests: int) -> Simulation:
    """A random engine under random load, with aborts; every result is compared."""
    rng = random.Random(seed)
    asynchronous = rng.choice([False, True, "device", "device"])
    simulation = Simulation(
        vllm_config,
        num_blocks=rng.choice([16, 24, 40, 120]),
        block_size=rng.choice([1, 2, 4]),
        max_num_seqs=rng.choice([6, 9, 16]),
        max_num_batched_tokens=rng.choice([7, 16, 64]),
        prefix_caching=rng.random() < 0.6,
        asynchronous=asynchronous,
        max_loras=rng.choice([None, None, 1, 2]),
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
        overcommit=rng.random() < 0.5,
        window=rng.choice([None, 3, 8]),
    )
    room = simulation.scheduler.max_model_len
    expected: dict[str, list[Any]] = {}  # tokens, or hypotheses
    for number in range(num_requests):
        name = f"r{number}"
        prompt = [rng.randint(1, 4) for _ in range(rng.randint(1, max(1, room // 3)))]
        max_tokens = rng.randint(1, min(20, room - len(prompt) - 1))
        priority = rng.randint(0, 2)
        if rng.random() < 0.35:
            simulation.add_greedy(name, prompt, max_tokens, priority)
            expected[name] = expected_greedy(prompt, max_tokens)
        else:
            width = rng.randint(1, 6)
            n = rng.randint(1, width)
            options = {
                "early_stopping": rng.choice([True, False, "never"]),
                "length_penalty": rng.choice([0.0, 0.6, 1.0, 2.0]),
                "max_tokens": max_tokens,
            }
            if rng.random() < 0.2 and width % 2 == 0:
                options |= {"num_beam_groups": 2, "diversity_penalty": 0.5}
            simulation.add_beam(name, prompt, width, n, priority, **options)
            expected[name] = expected_beam(prompt, width, **options)[:n]
        for _ in range(rng.choice([0, 0, 1, 2, 5, 9])):
            if simulation.scheduler.has_requests():
                simulation.step()
        if rng.random() < 0.15:
            victim = rng.choice(sorted(expected))
            simulation.abort(victim)
            del expected[victim]
        if rng.random() < 0.02:
            simulation.scheduler.reset_prefix_cache(reset_running_requests=True)
    simulation.run(200_000)
    for name, result in expected.items():
        answer = simulation.finished[name]
        if answer.reason != "error":  # refused: it could never fit
            assert (answer.hypotheses or answer.token_ids) == result
    simulation.check_clean()
    assert simulation.scheduler.beam_counters.groups_failed == 0
    return simulation
