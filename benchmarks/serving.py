"""Latency of a server under load: plain vLLM, its `ngram`, `ngram_trie`.

Runs vLLM's own serving benchmark (`vllm bench serve`) against a server of each method, with a fixed
number of concurrent requests and with requests that arrive at a rate. All servers run at the same
time and are measured in turns, each with a cold prefix cache. A row holds medians over the turns;
`ttft_ratio` and `tokens_ratio` are medians of the ratios to plain vLLM within a turn.

    python benchmarks/serving.py --json serving.json
    python benchmarks/serving.py --questions question.jsonl --json serving.json

Without `--questions` or SPEC_BENCH_QUESTIONS, the shipped prompts take their place.
Turns repeat the prompts, and cache salts keep `ngram_trie` from knowing them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from support.harness import Row, add_model_option, interleave, option_parser, report_quietly
from support.peers_engines import METHODS
from support.replay_data import add_file_option

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "concurrency", "rate", "ttft_mean_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
    "tokens_per_s", "ttft_ratio", "ttft_p99_ratio", "tokens_ratio",
)  # fmt: skip
PLAIN = "plain"
MODEL_NAME = "tiny"
MAX_MODEL_LEN = 1024
METRICS = {
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_p50_ms": "p50_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "tokens_per_s": "output_throughput",
}
"""Names here and in vLLM's results."""


class Load(NamedTuple):
    """How requests arrive: one of the two is None."""

    concurrency: int | None
    rate: float | None


def speculative_configs(nodes: int) -> dict[str, dict[str, Any] | None]:
    """Return vLLM's `speculative_config` by method."""
    memory = local_engine.without_memory("ngram_trie")
    return {
        PLAIN: None,
        "ngram": METHODS["ngram"],
        "ngram_trie": {"method": "ngram_trie", "num_speculative_tokens": nodes, **memory},
    }


def main() -> None:
    """Measure and print."""
    smoke = {"methods": [PLAIN], "concurrency": [2], "rates": [], "num_prompts": 4}
    parser = option_parser(__doc__, smoke={**smoke, "max_tokens": 8})
    add_model_option(parser, "a chat model; the shipped one if left out")
    parser.add_argument("--nodes", type=int, default=32, help="node limit of ngram_trie")
    parser.add_argument("--concurrency", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--rates", nargs="*", type=float, default=[2.0, 8.0], help="requests/s")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=96, help="requests of a measurement")
    parser.add_argument("--methods", nargs="+", default=[PLAIN, "ngram", "ngram_trie"])
    add_file_option(parser, "--questions")
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start the servers, then measure every load in turns."""
    from vllm_trie.lab.tiny_model import model_path

    model = options.model = options.model or str(model_path())
    prompts = choose_prompts(model, options.questions, options.num_prompts)
    loads = [Load(n, None) for n in options.concurrency] + [Load(None, r) for r in options.rates]
    configs = speculative_configs(options.nodes)
    with tempfile.TemporaryDirectory() as folder:
        servers = {
            method: start_server(model, configs[method], Path(folder) / f"{method}.log", options)
            for method in options.methods
        }
        try:
            for server in servers.values():
                server.wait_until_ready()
            runs = {
                method: partial(measure, server, prompts, options)
                for method, server in servers.items()
            }
            return [row for load in loads for row in compare(runs, load, options.repeats)]
        finally:
            for server in servers.values():
                server.stop()


def choose_prompts(model: str, questions: Path | None, number: int) -> list[list[int]]:
    """Return token ids to complete: first turns of questions, or the shipped prompts."""
    from support.prompts import prompt_sets
    from transformers import AutoTokenizer

    if questions is None:
        prompts = list(itertools.chain.from_iterable(prompt_sets(model).values()))
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        lines = questions.read_text(encoding="utf-8").splitlines()
        turns = [json.loads(line)["turns"][0] for line in lines if line.strip()]
        prompts = [tokenizer.encode(text)[: MAX_MODEL_LEN // 2] for text in turns]
    random.Random(0).shuffle(prompts)
    return [prompts[i % len(prompts)] for i in range(number)]


def start_server(model: str, config: Mapping[str, Any] | None, log: Path, options: Any) -> Any:
    """Start `vllm serve`, and do not wait for it.

    The worker runs in the engine's process, vLLM's default on one GPU. vLLM's default on CPU has a
    process for it, and two processes that poll for messages: with two cores for all of them the
    API server waits for seconds at times.
    """
    from tests.engine.serving import start

    room = max([1, *options.concurrency, 32 if options.rates else 1])
    arguments = [
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(room)),
        *("--kv-cache-memory-bytes", str(512 << 20)),
    ]
    if config is not None:
        arguments += ["--speculative-config", json.dumps(config)]
    return start(log, *arguments, model=model, worker_process=False, VLLM_SERVER_DEV_MODE="1")


def compare(
    runs: Mapping[str, Callable[[Load], dict[str, float]]], load: Load, repeats: int
) -> list[Row]:
    """Return a row for each method, after measuring all in turns."""
    timed = interleave({method: partial(run, load) for method, run in runs.items()}, repeats)
    measured = {method: [result for _, result in turns] for method, turns in timed.items()}
    base = measured.get(PLAIN)
    rows: list[Row] = []
    for method, turns in measured.items():
        row: Row = {"method": method, "concurrency": load.concurrency, "rate": load.rate}
        row |= {name: median(turn[name] for turn in turns) for name in turns[0]}
        if base is not None:
            for ratio, name in (
                ("ttft_ratio", "ttft_mean_ms"),
                ("ttft_p99_ratio", "ttft_p99_ms"),
                ("tokens_ratio", "tokens_per_s"),
            ):
                row[ratio] = median(
                    ours[name] / plain[name] for ours, plain in zip(turns, base, strict=True)
                )
        rows.append(row)
    return rows


def measure(
    server: Any, prompts: Sequence[list[int]], options: Any, load: Load
) -> dict[str, float]:
    """Run vLLM's serving benchmark once, with a cold prefix cache."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.tokenizers import get_tokenizer

    server.http.post("/reset_prefix_cache").raise_for_status()
    requests = [
        SampleRequest(
            prompt=prompt,
            prompt_len=len(prompt),
            expected_output_len=options.max_tokens,
            request_overrides={"cache_salt": salt},
        )
        for prompt, salt in zip(prompts, local_engine.new_salts(prompts), strict=True)
    ]
    # What `vllm bench serve` passes; its data sets need pandas, token ids need nothing.
    result = asyncio.run(
        benchmark(
            task_type=TaskType.GENERATION,
            endpoint_type="openai",
            api_url=f"{server.url}/v1/completions",
            base_url=server.url,
            model_id=MODEL_NAME,
            model_name=MODEL_NAME,
            tokenizer=get_tokenizer(options.model),
            input_requests=requests,
            logprobs=None,
            request_rate=float("inf") if load.rate is None else load.rate,
            burstiness=1.0,
            disable_tqdm=True,
            num_warmups=0,
            ready_check_timeout_sec=0,  # which would send the first request twice
            profile=False,
            selected_percentile_metrics=["ttft", "tpot"],
            selected_percentiles=[50.0, 99.0],
            ignore_eos=True,
            goodput_config_dict={},
            max_concurrency=load.concurrency,
            lora_modules=None,
            extra_headers=None,
            extra_body={"temperature": 0.0},
        )
    )
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {len(prompts)} requests failed")
    return {name: result[key] for name, key in METRICS.items()}


if __name__ == "__main__":
    main()
