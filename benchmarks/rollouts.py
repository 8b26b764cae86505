"""Rollouts of reinforcement learning: the same prompts over epochs, n samples as separate requests.

Each row is an epoch of one method. Samples have seeds of their own, other ones in each epoch, so
all methods that keep vLLM's choice of tokens decode the same texts. Epochs of a method follow one
another in one engine that begins empty; with two replicas, every other sample goes to the other
engine, and an epoch begins a second after the last one's end. Tokens per step count behind each
request's first token; they do not depend on the machine or its load.

    python benchmarks/rollouts.py --model smollm2 --questions question.jsonl --json rollouts.json

Without `--questions` or SPEC_BENCH_QUESTIONS, the demo's prompts take the place of Spec-Bench's
math and coding.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from support.device import add_device_options, check_device, engine_options
from support.engines import keep_kernel_overrides, served
from support.harness import Row, add_model_option, option_parser, report_quietly
from support.peers_engines import available
from support.replay_data import add_file_option, read_lines

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "replicas", "n", "temperature", "epoch", "tokens_per_step", "over_first_epoch",
    "tokens", "seconds",
)  # fmt: skip
CATEGORIES = ("math", "coding", "math_reasoning")
METHODS: dict[str, dict[str, Any]] = {
    "ngram_trie": {"method": "ngram_trie"},
    "suffix": {"method": "suffix"},
}
EPOCHS = 2
PAUSE = 1.0
"""Seconds between the epochs of replicas, less than any training step takes."""


class Replica:
    """An engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.tokens = self.steps = 0
        """Of an epoch, behind the first token of each request."""
        self._number = itertools.count()

    def run(
        self, samples: Sequence[tuple[list[int], int]], params: Any, at_once: int
    ) -> Iterator[None]:
        """Decode an epoch's prompts with their seeds; yield after each step."""
        self.tokens = self.steps = 0
        started: set[str] = set()  # requests that have their first token
        for _, results in served(self.llm, self._requests(samples, params), at_once):
            for result in results:
                name, num_new = result.request_id, len(result.outputs[0].token_ids)
                if name in started:
                    self.tokens += num_new
                    self.steps += 1
                elif num_new:
                    started.add(name)
            yield

    def _requests(
        self, samples: Sequence[tuple[list[int], int]], params: Any
    ) -> Iterator[tuple[str, Any, Any]]:
        for prompt, seed in samples:
            of_sample = params.clone()
            of_sample.seed = seed
            inputs = {"prompt_token_ids": prompt, "cache_salt": "rollouts"}
            yield f"sample-{next(self._number)}", inputs, of_sample


def epoch_rows(replicas: Sequence[Replica], options: Any, row: Row) -> list[Row]:
    """Return a row for each epoch of a method, number of samples and temperature."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=row["temperature"],
        max_tokens=options.max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    rows: list[Row] = []
    for epoch in range(EPOCHS):
        samples = [
            (prompt, epoch * row["n"] + sample)
            for prompt in options.prompts
            for sample in range(row["n"])
        ]
        start = time.perf_counter()
        runs = [
            replica.run(samples[number :: len(replicas)], params, options.at_once)
            for number, replica in enumerate(replicas)
        ]
        for _ in itertools.zip_longest(*runs):  # a step of each in turn
            pass
        tokens = sum(replica.tokens for replica in replicas)
        rate = tokens / max(sum(replica.steps for replica in replicas), 1)
        rows.append(
            {
                **row,
                "epoch": epoch + 1,
                "tokens_per_step": rate,
                "over_first_epoch": rate / rows[0]["tokens_per_step"] if rows else 1.0,
                "tokens": tokens,
                "seconds": time.perf_counter() - start,
            }
        )
        if len(replicas) > 1:
            time.sleep(PAUSE)
    return rows


def read_prompts(model: str, options: Any) -> list[list[int]]:
    """Return the prompts: questions spread evenly over each category, or the demo's."""
    from transformers import AutoTokenizer

    from vllm_trie.lab.tiny_model.chat_prompts import chat_tokens

    if options.questions is None:
        from support.prompts import demo_chats

        return list(demo_chats(model).values())[: options.per_category]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for category in CATEGORIES:
        questions = [q for q in read_lines(options.questions) if q["category"] == category]
        questions = questions[1::2]
        number = min(options.per_category, len(questions))
        chosen = [questions[i * len(questions) // number] for i in range(number)]
        prompts += [chat_tokens(tokenizer, question["turns"][0]) for question in chosen]
    return prompts


def run(options: Any) -> list[Row]:
    """Measure one method after the other, each with engines of its own."""
    from vllm_trie.lab.tiny_model import model_path

    check_device(options.device)
    model = options.model or str(model_path())
    options.prompts = read_prompts(model, options)
    longest = max(map(len, options.prompts))
    rows: list[Row] = []
    methods = {name: METHODS[name] for name in available(options.methods)}
    for name, settings in options.variant:
        methods[name] = {"method": "ngram_trie", **json.loads(settings)}
    for (method, config), replicas in itertools.product(methods.items(), options.replicas):
        config = {"num_speculative_tokens": options.nodes, **config}
        if config["method"] == "ngram_trie":
            config.setdefault("node_budget", "fixed")
        settings = {
            **engine_options(options),
            "max_model_len": local_engine.room_for(longest, options.max_tokens, options.nodes),
            "max_num_seqs": options.at_once,
            # vLLM 0.32 fails at seeded requests whose prefill is in parts.
            "max_num_batched_tokens": options.at_once * (longest + options.nodes + 1),
            "dtype": options.dtype,
        }
        for n, temperature in itertools.product(options.n, options.temperatures):
            with ExitStack() as stack:
                engines = []
                for _ in range(replicas):
                    llm = local_engine.start_engine(model, **settings, speculative_config=config)
                    stack.callback(llm.llm_engine.engine_core.shutdown)
                    keep_kernel_overrides()
                    engines.append(Replica(llm))
                row = {"method": method, "replicas": replicas, "n": n, "temperature": temperature}
                rows += epoch_rows(engines, options, row)
    return rows


def main() -> None:
    """Measure and print."""
    smoke = {"n": [2], "temperatures": [1.0], "replicas": [1, 2], "per_category": 1}
    smoke |= {"max_tokens": 8, "at_once": 4, "nodes": 8, "methods": ["ngram_trie"]}
    parser = option_parser(__doc__, repeats=1, smoke=smoke | {"questions": None})
    add_model_option(parser, "a chat model; the shipped one if left out")
    add_device_options(parser)
    add_file_option(parser, "--questions")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--variant", nargs=2, action="append", default=[], metavar=("NAME", "JSON"),
        help="a further method: options of ngram_trie",
    )  # fmt: skip
    parser.add_argument("--replicas", nargs="+", type=int, default=[1])
    parser.add_argument("--n", nargs="+", type=int, default=[8])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--per-category", type=int, default=2, help="questions")
    parser.add_argument("--at-once", type=int, default=16, help="requests that an engine runs")
    parser.add_argument("--nodes", type=int, default=16, help="all verified; tokens of chains")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


if __name__ == "__main__":
    main()
