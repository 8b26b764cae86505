"""The engines that peers.py compares, and one measured request or load."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.engines import each_schedule, keep_kernel_overrides, served
from support.harness import Progress, take_turns
from support.paper_drafter import PaperDrafter
from vllm_trie.lab import local_engine, smollm2
from vllm_trie.lab.local_engine import NGRAM, decode_steps, runner_of, verifier_of

PLAIN = "plain"
METHODS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    # Of 5 to 32 tokens and n-grams of 1 to 5 the best on Spec-Bench at the cost of a 0.4 B shape.
    "ngram": {"method": "ngram", **NGRAM},
    # On GPUs alone: `ngram` on the device, which keeps asynchronous scheduling.
    "ngram_gpu": {"method": "ngram_gpu", **NGRAM},
    # vLLM's defaults, 24 tokens among them.
    "suffix": {"method": "suffix"},
    "ngram_trie": {"method": "ngram_trie"},
    "ngram_trie_chain": {
        "method": "ngram_trie",
        "num_speculative_tokens": 16,
        "verification": "chain",
    },
    # The n-gram-trie paper's method: every one of 32 drafts is verified.
    "paper": {
        "method": PaperDrafter.name,
        "num_speculative_tokens": 32,
        "node_budget": "fixed",
    },
    "lookahead": {"method": "lookahead_trie", "num_speculative_tokens": 32},
    # With heads of SmolLM2's, which ship.
    "medusa": {
        "method": "medusa_dynamic",
        "model": str(smollm2.medusa_path()),
        "num_speculative_tokens": 32,
    },
    "ngram_trie_fixed_8": {
        "method": "ngram_trie",
        "num_speculative_tokens": 8,
        "node_budget": "fixed",
    },
}
"""Name -> vLLM's `speculative_config`; `"prepare": false` in it keeps a drafter from preparing
drafts while a GPU computes."""
PEERS = ("ngram", "ngram_gpu", "suffix")
DEFAULT_METHODS = (PLAIN, "ngram", "ngram_gpu", "suffix", "ngram_trie", "ngram_trie_chain")
MOST_NODES = 32
_NO_ARCTIC = (
    "the package arctic-inference is not installed: pip install nanobind pybind11 grpcio-tools, "
    "then pip install --no-build-isolation --no-deps arctic-inference==0.3.0"
)
PARTS = ("forward", "logits", "sampling", "drafting")


class Question(NamedTuple):
    """One request of a workload."""

    category: str
    prompt: list[int]
    answer: list[int] | None
    """The recorded answer that the model has to give; None if it is free."""
    max_tokens: int


class Load(NamedTuple):
    """Requests that an engine answers together: the next one begins when another has ended."""

    category: str
    questions: list[Question]
    at_once: int
    """Most requests that run at a time."""

    @property
    def answer(self) -> list[int] | None:
        """The recorded answers, one behind the other; None if they are free."""
        answers = [(question.answer or [])[: question.max_tokens] for question in self.questions]
        return [token for answer in answers for token in answer] or None


class Measured(NamedTuple):
    """One request, run alone, or one load."""

    output: list[int]
    """Of a load: the outputs one behind the other."""
    seconds: float
    """From the prompt's arrival to the last token."""
    first_token_seconds: float
    """0 for a load, where prefills and later tokens go together."""
    steps: int
    """Steps after the one with the first token, summed over the requests."""
    nodes: int
    """Draft tokens that were verified."""
    parts: dict[str, float]
    """Seconds in the steps after the first token, by part: see `PARTS`."""
    requests: int = 1


class _PartTimer:
    """Sums up the time in each part of an engine's steps; only the outermost call counts."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._depth = 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its time added to a part."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth = 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth = 0
                self.seconds[part] += time.perf_counter() - start

        return call


class Contestant:
    """One method's engine, in this process, and the time of its steps by part."""

    def __init__(self, method: str, model: str, **settings: Any) -> None:
        self.method = method
        config = dict(METHODS[method] or {})
        prepares = config.pop("prepare", True)
        self.llm = local_engine.start_engine(
            model, **{"max_num_seqs": 1, "speculative_config": config or None, **settings}
        )
        keep_kernel_overrides()
        self._runner, self._trees = runner_of(self.llm), verifier_of(self.llm)
        if not prepares:
            self._trees.guard.drafter.prepare = lambda *_: None
        self._memory = 0
        self._timer = _PartTimer()
        if hasattr(self._runner, "propose_draft_token_ids"):  # not on Model Runner V2
            self._watch()
        if hasattr(self._runner.model, "set_owners"):
            self._tell_owners()

    def _watch(self) -> None:
        """Time the runner's public methods and modules."""
        runner, timed = self._runner, self._timer.timed
        model = runner.model
        model.forward = timed("forward", model.forward)
        model.compute_logits = timed("logits", model.compute_logits)
        for name in ("sampler", "rejection_sampler"):
            if module := getattr(runner, name, None):
                module.forward = timed("sampling", module.forward)
        runner.propose_draft_token_ids = timed("drafting", runner.propose_draft_token_ids)

    def _tell_owners(self) -> None:
        """Let a replay model know which question each row of a step belongs to."""
        runner = self._runner
        is_v2 = hasattr(runner, "prepare_inputs")
        name = "prepare_inputs" if is_v2 else "_prepare_inputs"
        stock = getattr(runner, name)

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            inputs = stock(*args, **kwargs)
            batch = inputs if is_v2 else runner.input_batch
            starts = batch.query_start_loc_np if is_v2 else runner.query_start_loc.np
            num_rows = np.diff(starts[: len(batch.req_ids) + 1])
            runner.model.set_owners([_index_of(name) for name in batch.req_ids], num_rows)
            return inputs

        setattr(runner, name, prepare_inputs)

    def _part_seconds(self) -> dict[str, float]:
        seconds = dict(self._timer.seconds)
        if self._trees is not None:  # trees are verified without vLLM's samplers; chains add 0
            seconds["sampling"] += self._trees.totals.verification_seconds
        return seconds

    def forget(self) -> None:
        """Begin anew: neither drafter nor prefix cache know the requests so far.

        This project's store and the prefix cache keep to a cache salt. vLLM's suffix decoding has
        no salts, so it gets an empty cache.
        """
        self._memory += 1
        drafter = getattr(self._runner, "drafter", None)
        if hasattr(drafter, "suffix_cache"):
            cache = drafter.suffix_cache
            drafter.suffix_cache = type(cache)(
                max_tree_depth=cache.max_tree_depth, max_cached_requests=cache.max_cached_requests
            )

    def run(self, question: Question) -> Measured:
        """Decode one request greedily and alone."""
        output: list[int] = []
        steps, nodes, first_token, before = 0, [0], 0.0, dict.fromkeys(PARTS, 0.0)
        with each_schedule(self.llm, _count_nodes(nodes)):
            start = time.perf_counter()
            for work in decode_steps(
                self.llm, [question.prompt], _params_of(question), str(self._memory)
            ):
                new = [token for step in work for token in step.tokens]
                if new and not output:
                    first_token, before = time.perf_counter(), self._part_seconds()
                elif new:
                    steps += 1
                output += new
            end = time.perf_counter()
        after = self._part_seconds()
        parts = {part: after[part] - before[part] for part in PARTS}
        return Measured(output, end - start, first_token - start, steps, nodes[0], parts)

    def serve(self, load: Load) -> Generator[Progress, None, Measured]:
        """Decode a load greedily, never more than `at_once` requests at a time.

        Yields:
            After each step.
        """
        prompts = local_engine.inputs_of(
            [question.prompt for question in load.questions], str(self._memory)
        )
        requests = [
            (f"prompt-{index}", prompt, _params_of(question))
            for index, (prompt, question) in enumerate(zip(prompts, load.questions, strict=True))
        ]
        outputs: list[list[int]] = [[] for _ in load.questions]
        seconds, num_tokens, steps, nodes, before = 0.0, 0, 0, [0], self._part_seconds()
        with each_schedule(self.llm, _count_nodes(nodes)):
            for step_seconds, results in served(self.llm, requests, load.at_once):
                seconds += step_seconds
                for result in results:
                    output, new = outputs[_index_of(result.request_id)], result.outputs[0].token_ids
                    steps += bool(output and new)
                    output.extend(new)
                    num_tokens += len(new)
                yield Progress(seconds, num_tokens)
        after = self._part_seconds()
        parts = {part: after[part] - before[part] for part in PARTS}
        together = [token for output in outputs for token in output]
        return Measured(together, seconds, 0.0, steps, nodes[0], parts, len(outputs))


def _params_of(question: Question) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=question.max_tokens,
        ignore_eos=question.answer is not None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _index_of(request_id: str) -> int:
    return int(request_id.split("-")[1])  # vLLM appends something random


def _count_nodes(nodes: list[int]) -> Callable[[Any], None]:
    """Return what adds the draft tokens of a schedule to `nodes`."""

    def count(scheduled: Any) -> None:
        nodes[0] += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))

    return count


def available(methods: Sequence[str]) -> list[str]:
    """Return the methods that can run here; print a line for each whose package is missing."""
    kept = []
    for method in methods:
        if method == "ngram_gpu":
            import torch

            if not torch.cuda.is_available():
                continue
        if method.startswith("suffix") and importlib.util.find_spec("arctic_inference") is None:
            print(f"{method} is left out: {_NO_ARCTIC}", flush=True)
        else:
            kept.append(method)
    return kept


def answer(contestants: Sequence[Any], work: Question | Load) -> Iterator[Measured]:
    """Let every engine answer a question after the one before, or all of them a load in turns.

    Yields:
        A measurement of each engine, in their order.
    """
    if isinstance(work, Question):
        yield from (contestant.run(work) for contestant in contestants)
    else:
        yield from take_turns([contestant.serve(work) for contestant in contestants])


def run_in_turns(
    contestants: Sequence[Any],
    questions: Sequence[Question | Load],
    repeats: int,
    prepare: Callable[[Question | Load], None],
    advance: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, str, Measured]]:
    """Ask every engine each question in turn; the order rotates with each question.

    Args:
        contestants: warm :class:`Contestant`, or others with its methods.
        questions: asked in this order; a load takes the place of a question.
        repeats: passes over all questions; the engines forget in between, and before each load.
        prepare: called before each question.
        advance: called after each question.

    Yields:
        The question's index, the method and the measurement.
    """
    for repeat in range(repeats):
        for index, question in enumerate(questions):
            if index == 0 or isinstance(question, Load):
                for contestant in contestants:
                    contestant.forget()
            prepare(question)
            first = (index + repeat) % len(contestants)
            order = [*contestants[first:], *contestants[:first]]
            for contestant, measured in zip(order, answer(order, question), strict=True):
                yield index, contestant.method, measured
            advance()


@contextmanager
def replaying(shape: str, vocab_size: int) -> Iterator[str]:
    """Write a replay model that vLLM can load, and give its folder to the block.

    Args:
        shape: a key of the replay model's shapes.
        vocab_size: of the tokenizer of the recorded text.
    """
    from support import replay_model

    replay_model.register()
    with tempfile.TemporaryDirectory() as folder:
        yield replay_model.write_config(Path(folder), shape, vocab_size)


def replay_settings(dtype: str) -> Mapping[str, Any]:
    """Return the engine options of a replay model."""
    return {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": dtype}
