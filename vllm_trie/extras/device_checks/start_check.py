"""A few prompts decoded with and without drafts on the device, before an engine serves.

Drafts ran on one device, an H200, in bfloat16. An engine whose drafts raise, change greedy output,
or make decoding slower therefore serves without them.

Among the prompts are a sampled one, one with a grammar, one with vLLM's adapter of zeros where LoRA
is on, and one that is as long as 2,048 tokens. Rounding turns two tokens round that are about as
likely: a token that differs from plain decoding's must be among its six likeliest, and near the
first of them (:func:`near_tie`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.worker.gpu import warmup

from vllm_trie.drafts import Drafter, DrafterOptions, DraftRequest
from vllm_trie.drafts.engine.runners import v2_lengths
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_trie.drafts.budget import NodeBudget
    from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter

logger = init_logger(f"vllm.{__name__}")

NUM_LIKELIEST = 6
"""Tokens of plain decoding among which a different token must be."""
TOO_UNLIKELY = 8.0
"""Difference of log-probabilities from the likeliest token. At the check's temperature a token that
far off has a chance of exp(-20)."""
TEMPERATURE = 0.4
PROMPT_LENGTH = 12
_LONG_PROMPT = 2048
NUM_TOKENS = 24
"""Output tokens of each prompt."""
_ERROR_EVERY = 5  # drafts with a wrong token among them
_ALIGNED = 16
"""Triton compiles kernels anew for numbers that this divides. Serving needs both versions."""
EVEN, ODD = np.array([0x55555555, 0xAAAAAAAA], dtype=np.uint32).view(np.int32)
"""Masks that allow every other token."""
GRAMMAR = StructuredOutputsParams(json_object=True)
"""Of requests with such masks, so that their drafts are chains."""


def near_tie(dtype: torch.dtype) -> float:
    """Return the difference of log-probabilities that rounding may turn round.

    In 16-bit types logits of 32 lie 0.25 apart in bfloat16, and four such steps are allowed.
    """
    return 1.0 if dtype.itemsize == 2 else 0.15


class Prompt(NamedTuple):
    """A request of the check.

    Attributes:
        params: Of sampling.
        has_grammar: Whether its tokens must be even and odd by turns.
        adapter: One of those of vLLM's warm-up.
    """

    token_ids: list[int]
    params: SamplingParams
    has_grammar: bool = False
    adapter: LoRARequest | None = None


class Decoded(NamedTuple):
    """One run over the prompts."""

    tokens: list[list[int]]
    margins: list[list[dict[int, float]]]
    """How much less likely each output token and the likeliest ones are than the first."""
    step_seconds: float
    """Median of the decoding steps."""
    tokens_per_step: float
    """Mean of one request's tokens in the decoding steps."""


def random_prompt(
    number: int, length: int, vocab_size: int, has_grammar: bool = False, **params: Any
) -> Prompt:
    """Return the request of a number, greedy if `params`, those of sampling, say nothing else."""
    token_ids = np.random.default_rng(number).integers(0, vocab_size, max(length, 0)).tolist()
    options = {"temperature": 0.0, "logprobs": NUM_LIKELIEST, **params}
    sampling = SamplingParams(**options, ignore_eos=True, watermarking=False)
    return Prompt(token_ids, sampling, has_grammar)


def answers_by_prompt(
    prompts: Sequence[Prompt], plain: Decoded
) -> dict[tuple[int, ...], list[int]]:
    """Return what plain decoding gave, as :class:`KnownAnswers` takes it."""
    return {
        tuple(prompt.token_ids): tokens
        for prompt, tokens in zip(prompts, plain.tokens, strict=True)
    }


class KnownAnswers(Drafter):
    """Drafts the outputs that plain decoding gave, now and then with an error; a tree begins with a
    wrong node, so that the others are neither a chain nor where their KV belongs."""

    name = "start_check"
    Options = DrafterOptions

    def __init__(self, context: Any, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(DrafterOptions(), context)
        self._answers = answers
        self._num_calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        drafts = [self._draft(request) for request in requests]
        self._num_calls += 1
        num_rows = len(drafts) + sum(len(tokens) for tokens, _ in drafts)
        for tokens, parents in drafts if self._num_calls % 2 else []:
            while tokens and num_rows % _ALIGNED:
                tokens.pop()
                parents.pop()
                num_rows -= 1
        return [TokenTree.from_lists(tokens, parents) for tokens, parents in drafts]

    def _draft(self, request: DraftRequest) -> tuple[list[int], list[int]]:
        text = request.token_ids.tolist()
        prompt, output = text[: request.num_prompt_tokens], text[request.num_prompt_tokens :]
        is_tree = request.max_nodes > 1 and not request.chain_only
        length = min(request.max_nodes - is_tree, request.max_depth)
        path = self._answers.get(tuple(prompt), [])[len(output) :][:length]
        if path and len(output) % _ERROR_EVERY == 0:
            path[-1] = self._wrong(path[-1])
        if not is_tree or not path:
            return path, [*range(-1, len(path) - 1)]
        return [self._wrong(path[0]), *path], [-1, -1, *range(1, len(path))]

    def _wrong(self, token: int) -> int:
        return (token + 1) % self.context.vocab_size


class _Agreement:
    """The first reason of all ranks, each of which waits for the others until there is one.

    A rank that raises leaves the others waiting in whatever comes next: they agree before that.

    Args:
        agree: Returns the first reason of all ranks, once each of them has called it.
    """

    def __init__(self, agree: Callable[[str | None], str | None]) -> None:
        self._agree = agree
        self._reason: str | None = None

    def reason(self, why: str | None = None) -> str | None:
        self._reason = self._reason or self._agree(why)
        return self._reason

    def raise_reason(self) -> None:
        """Raise if a rank has a reason."""
        if self.reason() is not None:
            raise RuntimeError(self._reason)


def reason_against_drafts(
    worker: Worker, adapter: V2Adapter, agree: Callable[[str | None], str | None]
) -> str | None:
    """Return why the engine must serve without drafts, None if it may draft; the same on all ranks.

    One rank logs that drafts have passed.

    Args:
        worker: Warmed up and without requests.
        adapter: Of its runner, not drafting yet.
        agree: See :class:`_Agreement`.
    """
    start = time.perf_counter()
    verifier, agreement, why, passed = adapter.verifier, _Agreement(agree), None, False
    drafter, budget, share_trees = verifier.guard.drafter, verifier.budget, verifier.share_trees

    def share_together(drafts: list[TokenTree]) -> list[TokenTree]:
        agreement.raise_reason()
        return drafts if share_trees is None else share_trees(drafts)

    verifier.budget, verifier.share_trees = None, share_together
    runner: Any = worker.model_runner
    try:
        with runner.maybe_setup_dummy_loras(runner.lora_config):
            decoder = _Decoder(worker, adapter, agreement)
            if decoder.prompts:
                why = _compare(decoder, adapter, budget)
                passed = why is None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    finally:
        verifier.guard.drafter, verifier.budget, verifier.share_trees = drafter, budget, share_trees
        adapter.forget_stats()
        runner.maybe_remove_all_loras(runner.lora_config)  # vLLM leaves them after an exception
    why = agreement.reason(why)
    if passed and why is None:
        logger.info_once("Drafts passed their check in %.1f s", time.perf_counter() - start)
    return why


def _compare(decoder: _Decoder, adapter: V2Adapter, budget: NodeBudget | None) -> str | None:
    """Decode without drafts and with them; return what speaks against them.

    Let the budget expect the wait of steps that draft, which vLLM's profile of steps leaves out.
    """
    guard = adapter.verifier.guard
    decoder.run("compiling_plain", num_drafts=0)
    plain = decoder.run("plain", num_drafts=0)
    answers = answers_by_prompt(decoder.prompts, plain)
    guard.drafter = KnownAnswers(guard.drafter.context, answers)
    adapter.start_drafting()
    decoder.compile(adapter.num_draft_tokens)
    # Twice, as another program may slow one down; not only then, as ranks run the same steps.
    runs = [decoder.run(f"drafted{i}", adapter.num_draft_tokens, ahead=i > 0) for i in range(2)]
    drafted = min(runs, key=lambda run: run.step_seconds)
    if budget is not None and not adapter.launches_ahead:
        guard.drafter = KnownAnswers(guard.drafter.context, {})
        waited = decoder.run("waited", adapter.num_draft_tokens)
        budget.expect_wait(plain.step_seconds, waited.step_seconds)
    allowed = near_tie(decoder.dtype)
    wrong = (wrong_token(decoder.prompts, plain, run, allowed) for run in runs)
    return next(filter(None, wrong), None) or _slowdown(plain, drafted)


def wrong_token(
    prompts: Sequence[Prompt], plain: Decoded, drafted: Decoded, allowed: float
) -> str | None:
    for prompt, expected, tokens, margins, sampled in zip(
        prompts, plain.tokens, drafted.tokens, plain.margins, drafted.margins, strict=True
    ):
        if prompt.has_grammar:
            wrong = [at for at, token in enumerate(tokens) if (token - at) % 2]
            if wrong:
                return f"token {wrong[0]} of a test prompt is {tokens[wrong[0]]}, which is masked"
        if prompt.params.temperature:
            for at, token in enumerate(tokens):
                if not sampled[at][token] < TOO_UNLIKELY:  # NaN is too unlikely
                    return f"sampled token {at} of a test prompt is {token}, which is too unlikely"
            continue
        for at, token in () if prompt.has_grammar else enumerate(tokens):
            if not sampled[at][token] <= 0:
                return f"greedy token {at} of a test prompt is {token}, which is not the likeliest"
        pairs = enumerate(zip(expected, tokens, strict=True))
        first = next((i for i, (left, right) in pairs if left != right), None)
        if first is not None and not margins[first].get(tokens[first], np.inf) <= allowed:
            return (
                f"greedy token {first} of a test prompt is {tokens[first]}, without drafts "
                f"{expected[first]}"
            )
    return None


def _slowdown(plain: Decoded, drafted: Decoded) -> str | None:
    seconds = drafted.step_seconds / drafted.tokens_per_step
    if seconds <= plain.step_seconds:
        return None
    return (
        f"a token takes {1e3 * seconds:.3g} ms with drafts that are nearly always right, without "
        f"drafts {1e3 * plain.step_seconds:.3g} ms"
    )


def margins_of(ids: Iterable[int], logprobs: Any) -> dict[int, float]:
    """Return how much less likely the tokens of a row are than the first of them."""
    values = np.array(logprobs)
    return dict(zip(map(int, ids), np.max(values) - values, strict=True))


class _Output:
    """The tokens that the requests of a run have generated so far."""

    def __init__(self, number: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(number)]
        self.margins: list[list[dict[int, float]]] = [[] for _ in range(number)]

    def take(self, output: Any) -> int:
        """Wait for a step's output, add it, and return its number of tokens."""
        output = output.get_output() if hasattr(output, "get_output") else output
        logprobs = output.logprobs
        first_rows = logprobs.cu_num_generated_tokens
        num_new = 0
        for row, (name, new) in enumerate(
            zip(output.req_ids, output.sampled_token_ids, strict=True)
        ):
            index = int(name.split("_")[-2])
            first = row if first_rows is None else first_rows[row]
            for place, token in enumerate(new):
                at = first + place
                self.margins[index].append(
                    margins_of(logprobs.logprob_token_ids[at], logprobs.logprobs[at])
                )
                self.tokens[index].append(int(token))
            num_new += len(new)
        return num_new


class _Decoder:
    """The scheduler's part of a few requests' steps, as in vLLM's warm-up.

    Attributes:
        prompts: None of them if the engine has no room; the longest is the last.
        dtype: Of the model.
    """

    def __init__(self, worker: Worker, adapter: V2Adapter, agreement: _Agreement) -> None:
        self._worker = worker
        self._adapter = adapter
        self._agreement = agreement
        self._runner: GPUModelRunner = worker.model_runner  # type: ignore[assignment]
        self.dtype: Any = self._runner.dtype
        runner = self._runner
        self._count_blocks: Callable[[int, Any], int] = warmup._warmup_block_counter(runner)
        self._specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        self._num_runs = 0
        self._drafts_first = True
        self._is_async = runner.scheduler_config.async_scheduling
        dummy = LoRARequest("warmup_1", 1, "no path") if runner.lora_config else None
        prompt = partial(random_prompt, vocab_size=runner.vocab_size, max_tokens=10**6)
        self.prompts = self._fitting(
            [
                prompt(0, PROMPT_LENGTH),
                prompt(1, PROMPT_LENGTH, temperature=TEMPERATURE, seed=1),
                prompt(2, PROMPT_LENGTH, has_grammar=True, structured_outputs=GRAMMAR),
                prompt(3, PROMPT_LENGTH)._replace(adapter=dummy),
                prompt(4, min(_LONG_PROMPT, runner.max_model_len - self._room(0))),
            ]
        )

    def _room(self, length: int) -> int:
        return length + NUM_TOKENS + self._runner.decode_query_len

    def _fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts that the engine has room for, together."""
        runner = self._runner
        fitting: list[Prompt] = []
        blocks, tokens = 1, 0  # block 0 is vLLM's null block
        for prompt in prompts:
            length = len(prompt.token_ids)
            blocks += sum(self._count_blocks(self._room(length), spec) for spec in self._specs)
            tokens += max(min(length, PROMPT_LENGTH), runner.decode_query_len)
            has_room = (
                length > 0
                and self._room(length) <= runner.max_model_len
                and blocks <= runner.kv_cache_config.num_blocks
                and tokens <= runner.max_num_tokens
                and len(fitting) < runner.max_num_reqs
            )
            if not has_room:
                break
            fitting.append(prompt)
        return fitting

    def compile(self, num_drafts: int) -> None:
        """Run over all prompts, and over the greedy ones alone, whose logits keep the model's
        type."""
        self.run("compiling", num_drafts)
        every_prompt = self.prompts
        self.prompts = [p for p in every_prompt if not p.params.temperature and not p.has_grammar]
        try:
            self.run("compiling_greedy", num_drafts)
        finally:
            self.prompts = every_prompt

    def run(self, name: str, num_drafts: int, ahead: bool = False) -> Decoded:
        """Decode all prompts, with places for `num_drafts` draft tokens in each step, which is
        launched ahead of the drafts if `ahead`, in engines that do so.

        Without drafts, a step is launched before the output of the last is read, as the engine
        does that the check stands for.
        """
        self._drafts_first = not (ahead and self._adapter.launches_ahead)
        names = [f"_vllm_trie_{name}_{i}_" for i in range(len(self.prompts))]
        output = _Output(len(names))
        queued: deque[Any] = deque()
        num_launched = 1  # output tokens of each request without drafts
        launches, counts = [], []
        self._runner.kv_connector.set_disabled(True)
        try:
            self._prefill(names, output)
            while min(map(len, output.tokens)) < NUM_TOKENS:
                launches.append(time.perf_counter())
                lengths = [*map(len, output.tokens)]
                if not num_drafts:
                    lengths = [num_launched] * len(names)
                    num_launched += 1
                running = [i for i, n in enumerate(lengths) if n < NUM_TOKENS]
                if running:
                    queued.append(self._launch(names, lengths, running, num_drafts))
                if num_drafts or not self._is_async or len(queued) > 1 or not running:
                    counts.append(output.take(queued.popleft()) / max(len(running), 1))
            launches.append(time.perf_counter())
        finally:
            ended = SchedulerOutput.make_empty()
            ended.finished_req_ids = set(names)
            self._worker.execute_model(ended)
            self._runner.kv_connector.set_disabled(False)
        shortened = [tokens[:NUM_TOKENS] for tokens in output.tokens]
        seconds = statistics.median(np.diff(launches))
        return Decoded(shortened, output.margins, seconds, statistics.fmean(counts))

    def _prefill(self, names: Sequence[str], output: _Output) -> None:
        """Compute the prompts, the longest in parts, and take the first tokens."""
        counts = [
            [self._count_blocks(self._room(len(prompt.token_ids)), spec) for spec in self._specs]
            for prompt in self.prompts
        ]
        # Block 0 is vLLM's null block. Each run has other blocks than the one before: what a fault
        # leaves unwritten must not be there by chance.
        blocks = np.roll(np.arange(1, 1 + sum(map(sum, counts))), self._num_runs).tolist()
        self._num_runs += 1
        new_requests = []
        for name, prompt, sizes in zip(names, self.prompts, counts, strict=True):
            block_ids = [[blocks.pop() for _ in range(size)] for size in sizes]
            new_requests.append(
                NewRequestData(
                    req_id=name,
                    prompt_token_ids=prompt.token_ids,
                    mm_features=[],
                    sampling_params=prompt.params,
                    pooling_params=None,
                    block_ids=tuple(block_ids),
                    num_computed_tokens=0,
                    lora_request=prompt.adapter,
                    prefill_token_ids=prompt.token_ids,
                )
            )
        rest = len(self.prompts[-1].token_ids)
        part = self._runner.max_num_tokens - sum(len(p.token_ids) for p in self.prompts[:-1])
        step = self._empty()
        step.scheduled_new_reqs = new_requests[-1:]
        while rest > part:  # the longest alone
            self._execute(step, {names[-1]: part})
            rest -= part
            step = self._empty()
            step.scheduled_cached_reqs.req_ids.append(names[-1])
            step.scheduled_cached_reqs.num_computed_tokens.append(
                len(self.prompts[-1].token_ids) - rest
            )
            step.scheduled_cached_reqs.num_output_tokens.append(0)
            step.scheduled_cached_reqs.new_block_ids.append(None)
        step.scheduled_new_reqs = [*new_requests[:-1], *step.scheduled_new_reqs]
        tokens = {name: len(p.token_ids) for name, p in zip(names, self.prompts, strict=True)}
        grammar = self._masks(names, [0] * len(names), range(len(names)), 0)
        output.take(self._execute(step, {**tokens, names[-1]: rest}, grammar))

    def _launch(
        self, names: Sequence[str], lengths: Sequence[int], running: Sequence[int], num_drafts: int
    ) -> Any:
        step = self._empty()
        cached = step.scheduled_cached_reqs
        for index in running:
            cached.req_ids.append(names[index])
            num_computed = len(self.prompts[index].token_ids) + lengths[index] - 1
            cached.num_computed_tokens.append(num_computed)
            cached.num_output_tokens.append(lengths[index])
            cached.new_block_ids.append(None)
            if num_drafts:
                step.scheduled_spec_decode_tokens[names[index]] = [-1] * num_drafts
        sizes = {names[index]: 1 + num_drafts for index in running}
        return self._execute(step, sizes, self._masks(names, lengths, running, num_drafts))

    def _masks(
        self, names: Sequence[str], lengths: Sequence[int], running: Sequence[int], num_drafts: int
    ) -> GrammarOutput | None:
        """Return the masks of the requests with a grammar, as the scheduler makes them."""
        with_grammar = [index for index in running if self.prompts[index].has_grammar]
        num_rows = 1 + num_drafts
        if not v2_lengths.HAS_ROW_PER_PLACE:
            num_rows = self._runner.decode_query_len
        rows = [
            (EVEN, ODD)[place % 2]
            for index in with_grammar
            for place in range(lengths[index], lengths[index] + num_rows)
        ]
        if not rows:
            return None
        width = -(-self._runner.vocab_size // 32)
        bitmask = np.tile(np.array(rows, dtype=np.int32)[:, None], (1, width))
        accepted = [num_drafts] * len(with_grammar)
        return GrammarOutput([names[index] for index in with_grammar], bitmask, accepted)

    def _empty(self) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.scheduled_cached_reqs = CachedRequestData.make_empty()
        step.num_spec_tokens_to_schedule = self._runner.num_speculative_steps
        return step

    def _execute(
        self, step: SchedulerOutput, sizes: dict[str, int], grammar: GrammarOutput | None = None
    ) -> Any:
        step.num_scheduled_tokens = sizes
        step.total_num_scheduled_tokens = sum(sizes.values())
        if self._drafts_first:
            self._adapter.draft()
        self._agreement.raise_reason()
        self._worker.execute_model(step)
        return self._worker.sample_tokens(grammar)
