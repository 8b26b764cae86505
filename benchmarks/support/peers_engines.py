"""The engines that peers.py compares, and one measured request."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from support.device import start_engine
from support.engines import each_schedule, keep_kernel_overrides
from vllm_trie.local_engine import decode_steps, runner_of, trees_of

PLAIN = "plain"
METHODS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    # Of 5 to 32 tokens and n-grams of 1 to 5 the best on Spec-Bench at the cost of a 0.4 B shape.
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 5,
    },
    # vLLM's defaults for the lengths; it has none for the number of tokens.
    "ngram_default": {"method": "ngram", "num_speculative_tokens": 5},
    # vLLM's defaults, 24 tokens among them.
    "suffix": {"method": "suffix"},
    "ngram_trie": {"method": "ngram_trie", "num_speculative_tokens": 32},
    "ngram_trie_chain": {
        "method": "ngram_trie",
        "num_speculative_tokens": 16,
        "verification": "chain",
    },
    "ngram_trie_no_store": {
        "method": "ngram_trie",
        "num_speculative_tokens": 32,
        "store_tokens": 0,
    },
    "ngram_trie_fixed_8": {
        "method": "ngram_trie",
        "num_speculative_tokens": 8,
        "node_budget": "fixed",
    },
}
"""Name -> vLLM's `speculative_config`."""
PEERS = ("ngram", "ngram_default", "suffix")
DEFAULT_METHODS = (PLAIN, "ngram", "suffix", "ngram_trie", "ngram_trie_chain")
MOST_NODES = 32
PARTS = ("forward", "logits", "sampling", "drafting")


class Question(NamedTuple):
    """One request of a workload."""

    category: str
    prompt: list[int]
    answer: list[int] | None
    """The recorded answer that the model has to give; None if it is free."""
    max_tokens: int


class Measured(NamedTuple):
    """One request, run alone."""

    output: list[int]
    seconds: float
    """From the prompt's arrival to the last token."""
    first_token_seconds: float
    steps: int
    """Steps after the one with the first token."""
    nodes: int
    """Draft tokens that were verified."""
    parts: dict[str, float]
    """Seconds in the steps after the first token, by part: see `PARTS`."""


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
        self.llm = start_engine(
            model, max_num_seqs=1, speculative_config=METHODS[method], **settings
        )
        keep_kernel_overrides()
        self._runner, self._trees = runner_of(self.llm), trees_of(self.llm)
        self._memory = 0
        self._timer = _PartTimer()
        self._watch()

    def _watch(self) -> None:
        """Time the runner's public methods and modules."""
        runner, timed = self._runner, self._timer.timed
        model = runner.model
        model.forward = timed("forward", model.forward)
        model.compute_logits = timed("logits", model.compute_logits)
        for name in ("sampler", "rejection_sampler"):
            if module := getattr(runner, name, None):
                module.forward = timed("sampling", module.forward)
        if hasattr(runner, "propose_draft_token_ids"):  # not on Model Runner V2
            runner.propose_draft_token_ids = timed("drafting", runner.propose_draft_token_ids)

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
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=question.max_tokens,
            ignore_eos=question.answer is not None,
            detokenize=False,
        )
        output: list[int] = []
        steps, nodes, first_token, before = 0, 0, 0.0, dict.fromkeys(PARTS, 0.0)

        def count_nodes(scheduled: Any) -> None:
            nonlocal nodes
            nodes += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))

        with each_schedule(self.llm, count_nodes):
            start = time.perf_counter()
            for work in decode_steps(self.llm, [question.prompt], params, str(self._memory)):
                new = [token for step in work for token in step.tokens]
                if new and not output:
                    first_token, before = time.perf_counter(), self._part_seconds()
                elif new:
                    steps += 1
                output += new
            end = time.perf_counter()
        after = self._part_seconds()
        parts = {part: after[part] - before[part] for part in PARTS}
        return Measured(output, end - start, first_token - start, steps, nodes, parts)


def step_milliseconds(
    contestant: Contestant, sizes: Sequence[int], repeats: int = 5
) -> dict[int, float]:
    """Measure the model and its logits, without attention, by the number of tokens in a step.

    Returns:
        Number of tokens -> milliseconds, a median.
    """
    import torch
    from vllm.forward_context import set_forward_context

    model = runner_of(contestant.llm).model
    config = contestant.llm.llm_engine.vllm_config
    tokens, positions = torch.ones(max(sizes), dtype=torch.int32), torch.arange(max(sizes))
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size in sizes:
            start = time.perf_counter()
            # Without attention metadata, vLLM's attention layers do nothing.
            with set_forward_context(None, config, num_tokens=size), torch.inference_mode():
                model.compute_logits(model(tokens[:size], positions[:size]))
            if repeat:  # the first one warms up
                seconds[size].append(time.perf_counter() - start)
    return {size: 1e3 * median(values) for size, values in seconds.items()}


def available(methods: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the methods that can run here, and a line for each that cannot."""
    kept, missing = [], []
    for method in methods:
        if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
            missing.append("suffix is left out: the package arctic-inference is not installed")
        else:
            kept.append(method)
    return kept, missing


def run_in_turns(
    contestants: Sequence[Contestant],
    questions: Sequence[Question],
    repeats: int,
    prepare: Callable[[Question], None],
    advance: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, str, Measured]]:
    """Ask every engine each question in turn; the order rotates with each question.

    Args:
        contestants: warm engines.
        questions: asked in this order.
        repeats: passes over all questions; the engines forget in between.
        prepare: called before each question.
        advance: called after each question.

    Yields:
        The question's index, the method and the measurement.
    """
    for repeat in range(repeats):
        for each in contestants:
            each.forget()
        for index, question in enumerate(questions):
            prepare(question)
            first = (index + repeat) % len(contestants)
            for each in [*contestants[first:], *contestants[:first]]:
                yield index, each.method, each.run(question)
            advance()


@contextmanager
def replaying(shape: str, vocab_size: int, length: int) -> Iterator[str]:
    """Write a replay model that vLLM can load, and give its folder to the block.

    Args:
        shape: a key of the replay model's shapes.
        vocab_size: of the tokenizer of the recorded text.
        length: longest prompt and answer.
    """
    from support import replay_model

    replay_model.register()
    with tempfile.TemporaryDirectory() as folder:
        yield replay_model.write_config(Path(folder), shape, vocab_size, length)


def replay_settings(dtype: str) -> Mapping[str, Any]:
    """Return the engine options of a replay model."""
    return {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": dtype}
