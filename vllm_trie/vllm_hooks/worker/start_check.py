"""A few prompts decoded with and without drafts on the device, before an engine serves.

No GPU was at hand where the plugin was written. An engine whose drafts raise, change greedy output,
or make decoding slower therefore serves without them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu import warmup

from vllm_trie.drafters import Drafter, DrafterOptions, DraftRequest
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_trie.vllm_hooks.worker.runners.v2_adapter import V2Adapter

NEAR_TIE = 0.15
"""Difference of log-probabilities that rounding may turn round, in any dtype."""
_NUM_REQUESTS = 4
_PROMPT_LENGTH = 12
_NUM_TOKENS = 24
"""Output tokens of each prompt."""
_ERROR_EVERY = 5  # drafts with a wrong token among them


class _Decoded(NamedTuple):
    """One run over the prompts."""

    tokens: list[list[int]]
    margins: list[list[dict[int, float]]]
    """Of each output token: how much less likely the two likeliest tokens are than the first."""
    step_seconds: float
    """Median of the decoding steps."""
    tokens_per_step: float
    """Of one request, in the decoding steps."""


class _KnownAnswers(Drafter):
    """Drafts the outputs that plain decoding gave, now and then with an error."""

    name = "start_check"
    Options = DrafterOptions

    def __init__(self, context: Any, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(DrafterOptions(), context)
        self._answers = answers

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        trees = []
        for request in requests:
            text = request.token_ids.tolist()
            prompt, output = text[: request.num_prompt_tokens], text[request.num_prompt_tokens :]
            length = min(request.max_nodes, request.max_depth)
            path = self._answers[tuple(prompt)][len(output) :][:length]
            if path and len(output) % _ERROR_EVERY == 0:
                path[-1] = (path[-1] + 1) % self.context.vocab_size
            trees.append(TokenTree.from_paths([path], length))
        return trees


def reason_against_drafts(worker: Worker, adapter: V2Adapter) -> str | None:
    """Return why the engine must serve without drafts, None if it may draft.

    Args:
        worker: warmed up and without requests.
        adapter: of its runner, not drafting yet.
    """
    trees, drafter, budget = adapter.trees, adapter.trees.guard.drafter, adapter.trees.budget
    trees.budget = None
    try:
        decoder = _Decoder(worker)
        if not decoder.prompts:
            return None
        plain = decoder.run("plain", num_drafts=0)
        answers = {tuple(p): t for p, t in zip(decoder.prompts, plain.tokens, strict=True)}
        trees.guard.drafter = _KnownAnswers(drafter.context, answers)
        adapter.begin()
        decoder.run("compiling", adapter.num_places)
        # Twice, as another program may slow one down; not only then, as ranks run the same steps.
        runs = [decoder.run(f"drafted{i}", adapter.num_places) for i in range(2)]
        drafted = min(runs, key=lambda run: run.step_seconds)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trees.guard.drafter, trees.budget = drafter, budget
        adapter.forget_stats()
    return _wrong_token(plain, drafted) or _slowdown(plain, drafted)


def _wrong_token(plain: _Decoded, drafted: _Decoded) -> str | None:
    for expected, tokens, margins in zip(plain.tokens, drafted.tokens, plain.margins, strict=True):
        pairs = enumerate(zip(expected, tokens, strict=True))
        at = next((i for i, (left, right) in pairs if left != right), None)
        if at is not None and margins[at].get(tokens[at], np.inf) > NEAR_TIE:
            return (
                f"greedy token {at} of a test prompt is {tokens[at]}, without drafts {expected[at]}"
            )
    return None


def _slowdown(plain: _Decoded, drafted: _Decoded) -> str | None:
    seconds = drafted.step_seconds / drafted.tokens_per_step
    if seconds <= plain.step_seconds:
        return None
    return (
        f"a token takes {1e3 * seconds:.3g} ms with drafts that are nearly always right, without "
        f"drafts {1e3 * plain.step_seconds:.3g} ms"
    )


class _Decoder:
    """The scheduler's part of a few requests' steps, as in vLLM's warm-up.

    Attributes:
        prompts: token ids; none if the engine has no room for them.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._runner: GPUModelRunner = worker.model_runner  # type: ignore[assignment]
        runner = self._runner
        self._count_blocks: Callable[[int, Any], int] = warmup._warmup_block_counter(runner)
        self._specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        length = min(_PROMPT_LENGTH, runner.max_num_tokens)
        room = length + _NUM_TOKENS + runner.decode_query_len
        per_request = sum(self._count_blocks(room, spec) for spec in self._specs)
        number = min(
            _NUM_REQUESTS,
            runner.max_num_reqs,
            runner.max_num_tokens // max(length, runner.decode_query_len),
            (runner.kv_cache_config.num_blocks - 1) // max(per_request, 1),
        )
        if room > runner.max_model_len:
            number = 0
        generator = np.random.default_rng(0)
        self.prompts: list[list[int]] = [
            generator.integers(0, runner.vocab_size, length).tolist() for _ in range(number)
        ]

    def run(self, name: str, num_drafts: int) -> _Decoded:
        """Decode all prompts, with places for `num_drafts` draft tokens in each step."""
        names = [f"_vllm_trie_{name}_{i}_" for i in range(len(self.prompts))]
        next_block = 1  # block 0 is vLLM's null block
        blocks: list[tuple[list[int], ...]] = []
        length = len(self.prompts[0]) + _NUM_TOKENS + self._runner.decode_query_len
        for _ in names:
            block_ids = []
            for spec in self._specs:
                count = self._count_blocks(length, spec)
                block_ids.append([*range(next_block, next_block + count)])
                next_block += count
            blocks.append(tuple(block_ids))
        tokens: list[list[int]] = [[] for _ in names]
        margins: list[list[dict[int, float]]] = [[] for _ in names]
        seconds, counts = [], []
        self._runner.kv_connector.set_disabled(True)
        try:
            self._take(self._prefill(names, blocks), tokens, margins)
            while running := [i for i, some in enumerate(tokens) if len(some) < _NUM_TOKENS]:
                start = time.perf_counter()
                num_new = self._take(
                    self._step(names, tokens, running, num_drafts), tokens, margins
                )
                seconds.append(time.perf_counter() - start)
                counts.append(num_new / len(running))
        finally:
            ended = SchedulerOutput.make_empty()
            ended.finished_req_ids = set(names)
            self._worker.execute_model(ended)
            self._runner.kv_connector.set_disabled(False)
        shortened = [some[:_NUM_TOKENS] for some in tokens]
        return _Decoded(shortened, margins, statistics.median(seconds), statistics.fmean(counts))

    def _prefill(
        self, names: Sequence[str], blocks: Sequence[tuple[list[int], ...]]
    ) -> SchedulerOutput:
        params = SamplingParams(
            temperature=0.0, max_tokens=10**6, ignore_eos=True, logprobs=2, watermarking=False
        )
        step = self._empty()
        step.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=block_ids,
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=prompt,
            )
            for name, prompt, block_ids in zip(names, self.prompts, blocks, strict=True)
        ]
        step.num_scheduled_tokens = dict(zip(names, map(len, self.prompts), strict=True))
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        return step

    def _step(
        self,
        names: Sequence[str],
        tokens: Sequence[Sequence[int]],
        running: Sequence[int],
        num_drafts: int,
    ) -> SchedulerOutput:
        step = self._empty()
        cached = CachedRequestData.make_empty()
        for index in running:
            cached.req_ids.append(names[index])
            cached.num_computed_tokens.append(len(self.prompts[0]) + len(tokens[index]) - 1)
            cached.num_output_tokens.append(len(tokens[index]))
            cached.new_block_ids.append(None)
            step.num_scheduled_tokens[names[index]] = 1 + num_drafts
            if num_drafts:
                step.scheduled_spec_decode_tokens[names[index]] = [-1] * num_drafts
        step.scheduled_cached_reqs = cached
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        return step

    def _empty(self) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.num_spec_tokens_to_schedule = self._runner.num_speculative_steps
        return step

    def _take(
        self,
        step: SchedulerOutput,
        tokens: list[list[int]],
        margins: list[list[dict[int, float]]],
    ) -> int:
        """Run a step, add each request's output, and return its number of tokens."""
        self._worker.execute_model(step)
        output: Any = self._worker.sample_tokens(None)
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
                ids = logprobs.logprob_token_ids[first + place]
                values = logprobs.logprobs[first + place]
                best = max(values)
                margins[index].append(
                    dict(zip(map(int, ids), best - np.array(values), strict=True))
                )
                tokens[index].append(int(token))
            num_new += len(new)
        return num_new
