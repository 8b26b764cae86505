"""The engines that peers.py compares, and one measured request."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from speculation import keep_kernel_overrides

from vllm_trie.demo import engines

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
"""name -> vLLM's `speculative_config`."""
PEERS = ("ngram", "ngram_default", "suffix")
DEFAULT_METHODS = (PLAIN, "ngram", "suffix", "ngram_trie")
MOST_NODES = 32
PARTS = ("forward", "logits", "sampling", "drafting")


class Question(NamedTuple):
    """One request of a workload."""

    category: str
    prompt: list[int]
    answer: list[int] | None
    """The recorded answer, which the model must give; None if the model is free."""
    max_tokens: int


class Measured(NamedTuple):
    """One request, run alone."""

    output: list[int]
    seconds: float
    """From the prompt's arrival to the last token."""
    first_token_seconds: float
    steps: int
    """Steps after the one that gave the first token."""
    nodes: int
    """Draft tokens that were verified."""
    parts: dict[str, float]
    """Seconds in the steps after the first token, by part: see `PARTS`."""


@dataclass(slots=True)
class _Watch:
    """Sums up what an engine does."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    nodes: int = 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time counted."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return call


class Contestant:
    """One method's engine, in this process, and what it does step by step."""

    def __init__(self, method: str, model: str, **settings: Any) -> None:
        self.method = method
        self.llm = engines.start_engine(
            model, max_num_seqs=1, speculative_config=METHODS[method], **settings
        )
        keep_kernel_overrides()
        self._runner = engines.runner_of(self.llm)
        self._watch = _Watch()
        self._number = 0
        self._memory = "0"
        for part, name in (
            ("forward", "_model_forward"),
            ("sampling", "_sample"),
            ("drafting", "propose_draft_token_ids"),
        ):
            setattr(self._runner, name, self._watch.timed(part, getattr(self._runner, name)))
        model_object = self._runner.model
        model_object.compute_logits = self._watch.timed("logits", model_object.compute_logits)
        self._count_nodes()

    def _count_nodes(self) -> None:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        stock, watch = scheduler.schedule, self._watch

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            watch.nodes += sum(map(len, output.scheduled_spec_decode_tokens.values()))
            return output

        scheduler.schedule = schedule

    def forget(self) -> None:
        """Begin anew: neither drafter nor prefix cache know the requests so far.

        What the drafter of this project stores, and the blocks of the prefix cache, belong to a
        cache salt; vLLM's suffix decoding has no such thing, so it gets an empty cache.
        """
        self._memory = str(int(self._memory) + 1)
        drafter = getattr(self._runner, "drafter", None)
        if hasattr(drafter, "suffix_cache"):
            cache = drafter.suffix_cache
            drafter.suffix_cache = type(cache)(
                max_tree_depth=cache.max_tree_depth, max_cached_requests=cache.max_cached_requests
            )

    def run(self, question: Question) -> Measured:
        """Decode one request greedily and alone."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=question.max_tokens,
            ignore_eos=question.answer is not None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": question.prompt, "cache_salt": self._memory}
        engine, watch = self.llm.llm_engine, self._watch
        name = f"{self.method}-{self._number}"
        self._number += 1
        output: list[int] = []
        steps, first_token, before = 0, 0.0, {}
        nodes = watch.nodes
        start = time.perf_counter()
        engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests():
            new = [token for each in engine.step() for token in each.outputs[0].token_ids]
            if new and not output:
                first_token, before = time.perf_counter(), dict(watch.seconds)
            elif new:
                steps += 1
            output += new
        end = time.perf_counter()
        parts = {part: watch.seconds[part] - before.get(part, 0.0) for part in PARTS}
        return Measured(output, end - start, first_token - start, steps, watch.nodes - nodes, parts)


def step_milliseconds(
    contestant: Contestant, sizes: Sequence[int], repeats: int = 5
) -> dict[int, float]:
    """Tokens in a step -> milliseconds of the model and its logits, without attention; medians."""
    runner = engines.runner_of(contestant.llm)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size in sizes:
            start = time.perf_counter()
            hidden_states, _ = runner._dummy_run(size)
            runner.model.compute_logits(hidden_states[:size])
            if repeat:  # the first one warms up
                seconds[size].append(time.perf_counter() - start)
    return {size: 1e3 * median(values) for size, values in seconds.items()}


def available(methods: Sequence[str]) -> tuple[list[str], list[str]]:
    """The methods that can run here, and a line for each that cannot."""
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
    """Ask every engine every question, engine after engine; the order turns with each question.

    Args:
        contestants: engines that are warm.
        questions: asked in this order.
        repeats: how often; the engines forget in between.
        prepare: called before each question.
        advance: called after each question.

    Yields:
        The question's index, the method and what was measured.
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
    """The folder of a replay model, known to vLLM.

    Args:
        shape: a key of the replay model's shapes.
        vocab_size: of the tokenizer of the recorded text.
        length: longest prompt and answer.
    """
    import tempfile
    from pathlib import Path

    import _replay_model

    _replay_model.register()
    with tempfile.TemporaryDirectory() as folder:
        yield _replay_model.write_config(Path(folder), shape, vocab_size, length)


def replay_settings(dtype: str) -> Mapping[str, Any]:
    """Engine options of a replay model."""
    return {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": dtype}
