"""Generative recommendation: beams by the hundred over items of three tokens.

The shapes are those of OneRec's open models: Qwen3 of 0.6 or 1.7 B parameters, whose vocabulary has
three codebooks of 8,192 tokens behind Qwen's own, here with random weights. A prompt is a history
of items, an answer the best `width` items.

    items   this project's search inside the catalogue: every hypothesis is an item
    free    this project's search without a constraint
    vllm    vLLM's own `LLM.beam_search`

`--concurrency` requests run at a time, the next one begins when another has ended; methods take
turns. `vllm` takes its requests together, so that their latency is that of the call. `invalid` is
the share of hypotheses that are no items. `host_ms`, on a CPU, is a step's processor time in this
project's searches, without forward passes, logits and copies of KV.

    python benchmarks/recommend.py --items 1000000 --widths 50 100
    python benchmarks/recommend.py --device cuda --shape 1.7b --items 10000000 \
        --widths 50 100 256 512 1000 --concurrency 1 8 32 --requests 64
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.beam_parts import part_seconds
from support.beam_peers import Hypotheses, search_with_vllm
from support.device import add_device_options, check_device, engine_options
from support.engines import Prompts, served
from support.harness import Row, option_parser, report_quietly
from support.wide_beams import random_items

from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.sources import read_items
from vllm_trie.lab import local_engine, tiny_model
from vllm_trie.lab.local_engine import batches

COLUMNS = (
    "method", "width", "concurrency", "requests_per_s", "ratio_to_items", "p50_ms", "p99_ms",
    "invalid", "host_ms",
)  # fmt: skip
METHODS = ("items", "free", "vllm")
CODEBOOKS, CODES = 3, 8192
Answers = tuple[list[float], Hypotheses]
"""Seconds of each request, and its hypotheses."""
_QWEN_TOKENS = 151_936
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {  # for tests
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 128,
    },
    "0.6b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 3072,
    },
    "1.7b": {
        "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 6144,
    },
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    smoke = {"shape": "tiny", "items": 1000, "widths": [4], "requests": 2, "history": 4}
    parser = option_parser(__doc__, smoke=smoke)
    add_device_options(parser)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--items", type=int, default=1_000_000, help="in the catalogue")
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 100])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=8, help="of each row")
    parser.add_argument("--history", type=int, default=64, help="items of a prompt")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


def run(options: argparse.Namespace) -> list[Row]:
    """Return a row for each width, concurrency and method."""
    check_device(options.device)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), options)
        rows = []
        for width, concurrency in itertools.product(options.widths, options.concurrency):
            rows += bench.measure(width, concurrency)
    return rows


def write_model(folder: Path, shape: str) -> str:
    """Write the configuration of a model with random weights; return its folder."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128 if shape != "tiny" else 32,
        "vocab_size": _QWEN_TOKENS + CODEBOOKS * CODES,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "dtype": "bfloat16",
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # vLLM's own search wants one
        shutil.copy(tiny_model.model_path() / name, folder)
    return str(folder)


class Bench:
    """One engine, and the three ways to answer."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from vllm import LLM

        self._options = options
        self._items = random_items(options.items, CODEBOOKS, CODES, _QWEN_TOKENS)
        np.save(folder / "items.npy", self._items)
        catalogue = folder / "items.trie"
        build_items(catalogue, read_items(folder / "items.npy"))
        (folder / "items.npy").unlink()
        self._known = {tuple(item) for item in self._items.tolist()}
        plugin: dict[str, Any] = {"items": {"catalogue": str(catalogue)}}
        settings = {"dtype": "bfloat16", "enforce_eager": True, **engine_options(options)}
        most = max(options.widths) * max(options.concurrency)
        self._llm = LLM(
            write_model(folder, options.shape),
            **settings,
            load_format="dummy",
            max_model_len=CODEBOOKS * options.history + 64,
            max_num_seqs=most,
            max_logprobs=2 * max(options.widths),
            kv_cache_memory_bytes=4 << 30,
            enable_prefix_caching=False,
            additional_config={"vllm_trie": plugin},
        )

    def measure(self, width: int, concurrency: int) -> list[Row]:
        """Return the rows of all methods at one width and concurrency."""
        options = self._options
        rng = np.random.default_rng(width)
        chosen = rng.integers(len(self._items), size=(options.requests, options.history))
        prompts = [self._items[numbers].ravel().tolist() for numbers in chosen]
        ways = {
            method: self._search if method in ("items", "free") else self._call
            for method in options.methods
        }
        rows = []
        for method in options.methods:
            ways[method](prompts[:1], width, 1, method)  # warms up
        timed = local_engine.interleave(
            {
                method: lambda m=method: ways[m](prompts, width, concurrency, m)
                for method in options.methods
            },
            options.repeats,
        )
        for method in options.methods:
            seconds = sum(duration for duration, _ in timed[method])
            latencies = np.concatenate([result[0] for _, result in timed[method]])
            answers = [answer for _, result in timed[method] for answer in result[1]]
            tokens = [tuple(hypothesis[:CODEBOOKS]) for answer in answers for hypothesis in answer]
            rows.append(
                {
                    "method": method,
                    "width": width,
                    "concurrency": concurrency,
                    "requests_per_s": len(answers) / seconds,
                    "p50_ms": 1e3 * float(np.percentile(latencies, 50)),
                    "p99_ms": 1e3 * float(np.percentile(latencies, 99)),
                    "invalid": 1 - sum(item in self._known for item in tokens) / len(tokens),
                    "items": options.items,
                    "shape": options.shape,
                }
            )
            if method in ("items", "free") and options.device == "cpu":
                search = functools.partial(self._search, prompts, width, 1, method)
                model_class = type(local_engine.runner_of(self._llm).model)
                seconds = part_seconds(search, model_class)["host"]
                rows[-1]["host_ms"] = 1e3 * seconds / (CODEBOOKS * len(prompts))
        rates = {row["method"]: row["requests_per_s"] for row in rows}
        if "items" in rates:
            for row in rows:
                row["ratio_to_items"] = row["requests_per_s"] / rates["items"]
        return rows

    def _search(self, prompts: Prompts, width: int, concurrency: int, method: str) -> Answers:
        """Answer requests on the engine's own queue; return latencies and hypotheses."""
        from vllm import SamplingParams

        extra_args: dict[str, Any] = {"beam_width": width}
        if method == "items":
            extra_args["items"] = "catalogue"
        params = SamplingParams(
            n=width, temperature=0.0, max_tokens=CODEBOOKS, detokenize=False,
            ignore_eos=method == "free", extra_args=extra_args,
        )  # fmt: skip
        begun: dict[str, float] = {}

        def requests() -> Iterator[tuple[str, Any, Any]]:
            for number, prompt in enumerate(prompts):
                begun[f"r{number}"] = time.perf_counter()
                yield f"r{number}", {"prompt_token_ids": prompt}, params

        latencies, answers = [], []
        for _, outputs in served(self._llm, requests(), concurrency):
            for output in outputs:
                if output.finished:
                    latencies.append(time.perf_counter() - begun[output.request_id])
                    answers.append([list(hypothesis.token_ids) for hypothesis in output.outputs])
        return latencies, answers

    def _call(self, prompts: Prompts, width: int, concurrency: int, _: str) -> Answers:
        """Answer requests by vLLM's calls that return when all of theirs have ended."""
        latencies, answers = [], []
        for batch in batches(prompts, concurrency):
            start = time.perf_counter()
            answers += search_with_vllm(self._llm, batch, width, CODEBOOKS)
            latencies += [time.perf_counter() - start] * len(batch)
        return latencies, answers


if __name__ == "__main__":
    main()
