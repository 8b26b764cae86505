"""Beam search: native on shared blocks, vLLM's own, Hugging Face's, and plain sampling.

`trie` is this project's search, `vllm` vLLM's own (`LLM.beam_search` without the plugin), `hf` is
`transformers`' `generate(num_beams=b)`. `plain` is sampling with `n=b` in the same engine: the cost
of as many rows that do not search. All take the same model, prompts and number of tokens, run in
turns in this process, and start each run with an empty prefix cache. Times are medians. The engine
has its defaults: the model compiled, blocks of the size that an engine gets.

`computed_tokens` are the tokens that went through the model. `peak_blocks` are the most KV blocks
in use, `kv_over_greedy` is their ratio to those of as many greedy requests, and
`kv_bytes_per_token` the paper's Mem/Tok: peak KV bytes over the tokens of the prompt and of one
output. `trie_over_greedy` are the most tokens of a search's trie over those of a greedy request:
`kv_over_greedy` if blocks had one token. `hf` has no blocks: its cache holds the prompt and the
output b times, as b separate sequences would. `tokens_per_s` counts one output a prompt, as the
paper does. `best_score` is the mean log-probability of a token of the best hypothesis of the first
prompt, by the engine's model.

    python benchmarks/beam.py --json beam.json

`--wide` measures the searches of generative recommendation and retrieval: a few tokens, hundreds of
hypotheses. `requests_per_s` is the prompts over the time of all. `cpu_ms` is the processor time,
which other work on the machine disturbs less. Nobody decodes text, except for `vllm`.
`equal_to_trie` is the share of prompts and hypotheses whose tokens and order are those of `trie`;
vLLM's own search counts the prompt in its scores' lengths, which are equal here. Searches inside a
catalogue are in recommend.py.

    python benchmarks/beam.py --wide --eager --json wide.json
    python benchmarks/beam.py --wide --eager --widths 400 --prompt-lens 200 --num-prompts 1

`--parts` measures where a native search's processor time goes, with the loads of `--wide`.
`products_ms` are the matrix products of the model and its logits (`logits_ms`). These,
`attention_ms` and `kv_writes_ms` are parts of `forward_ms`, but for the logits. `host_ms_per_step`
is all that is neither forward pass, logits nor KV copies, over the new tokens.

    python benchmarks/beam.py --parts --eager --prompt-lens 200 --num-prompts 1
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from support.beam_parts import PARTS_COLUMNS, measure_parts
from support.beam_peers import Hypotheses, search_with_hf, search_with_vllm
from support.device import add_device_options, check_device, engine_options
from support.engines import each_schedule
from support.harness import (
    Row,
    add_model_option,
    interleave,
    median_seconds,
    option_parser,
    report,
    write_json,
)
from support.wide_beams import WIDE_COLUMNS, WIDE_DEFAULTS, measure_wide

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "prompt_len", "beam_width", "num_prompts", "total_ms", "ms_per_step", "tokens_per_s",
    "ratio_to_trie", "computed_tokens", "peak_blocks", "kv_over_greedy", "trie_over_greedy",
    "kv_bytes_per_token", "best_score", "identical_to_hf",
)  # fmt: skip
DEFAULTS = {
    "methods": ["trie", "vllm", "hf", "plain"], "widths": [4, 8, 16], "prompt_lens": [50, 1500],
    "num_prompts": [1, 8], "tokens": [64],
}  # fmt: skip
METHODS = ("trie", "vllm", "hf", "plain")
# Hugging Face copies the prompt's KV to every beam of every prompt: 128 of 1500 tokens would take
# longer than everything else together. One prompt always runs.
HF_MAX_TOKENS = 40_000


class Load(NamedTuple):
    """One line of the table."""

    prompt_len: int
    beam_width: int
    num_prompts: int
    new_tokens: int


class Usage(NamedTuple):
    """Work and memory of a run."""

    computed_tokens: int
    peak_blocks: int
    trie_tokens: int = 0


class Bench:
    """The engine, the model of `transformers`, and the four ways to run a load."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from vllm import LLM

        self._detokenize = not options.wide
        self._source = AutoTokenizer.from_pretrained(options.model).encode(_text())
        longest = max(options.prompt_lens) + max(options.tokens)
        most = max(options.widths) * max(options.num_prompts)
        settings = {"dtype": options.dtype, **engine_options(options)}
        self._llm = LLM(
            options.model,
            **settings | {"enforce_eager": options.eager},
            max_model_len=longest + 64,
            max_num_seqs=most,
            max_logprobs=2 * max(options.widths),  # as many as vLLM's own search asks for
            max_num_batched_tokens=4096,
            block_size=options.block_size,
            kv_cache_memory_bytes=options.kv_cache_gib << 30,
        )
        for cache in local_engine.runner_of(self._llm).kv_caches:
            cache.zero_()  # memory is mapped at its first use, which is not a search's time
        self.block_size = local_engine.scheduler_of(self._llm).block_size
        dtype = self._llm.llm_engine.vllm_config.model_config.dtype
        if "hf" in options.methods:
            hf = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
            self._hf = hf.to(options.device).eval()
            self._hf.generation_config.eos_token_id = None
        self.kv_bytes = local_engine.token_kv_bytes(options.model, dtype.itemsize)

    def model_class(self) -> type:
        """Return the class of the engine's model."""
        return type(local_engine.runner_of(self._llm).model)

    def prompts(self, load: Load) -> list[list[int]]:
        """Return different prompts of equal length, the same for every method."""
        room = len(self._source) - load.prompt_len
        starts = [number * 911 % room for number in range(load.num_prompts)]
        return [self._source[start : start + load.prompt_len] for start in starts]

    def run(self, method: str, load: Load) -> Hypotheses:
        """Return the generated tokens of each prompt and hypothesis."""
        return getattr(self, f"_run_{method}")(load)

    def _sampling_params(self, load: Load, **options: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=load.beam_width, max_tokens=load.new_tokens, detokenize=self._detokenize, **options
        )

    def _generate(self, load: Load, params: Any) -> Hypotheses:
        self._llm.reset_prefix_cache()
        results = self._llm.generate(
            [{"prompt_token_ids": token_ids} for token_ids in self.prompts(load)],
            params,
            use_tqdm=False,
        )
        return [[list(output.token_ids) for output in result.outputs] for result in results]

    def _run_trie(self, load: Load) -> Hypotheses:
        extra_args = {"beam_width": load.beam_width}
        params = self._sampling_params(
            load, temperature=0.0, ignore_eos=True, extra_args=extra_args
        )
        return self._generate(load, params)

    def _run_plain(self, load: Load) -> Hypotheses:
        return self._generate(load, self._sampling_params(load, temperature=1.0, ignore_eos=True))

    def _run_vllm(self, load: Load) -> Hypotheses:
        self._llm.reset_prefix_cache()
        return search_with_vllm(self._llm, self.prompts(load), load.beam_width, load.new_tokens)

    def _run_hf(self, load: Load) -> Hypotheses:
        return search_with_hf(self._hf, self.prompts(load), load.beam_width, load.new_tokens)

    def score(self, prompt: list[int], output: list[int]) -> float:
        """Return the mean log-probability of an output's tokens."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        [result] = self._llm.generate(
            [{"prompt_token_ids": prompt + output}], params, use_tqdm=False
        )
        entries = zip(result.prompt_logprobs[len(prompt) :], output, strict=True)
        return fmean(entry[token].logprob for entry, token in entries)

    def usage(self, method: str, load: Load) -> Usage:
        """Measure computed tokens and peak blocks, in a run that is not timed."""
        length = load.prompt_len + load.new_tokens
        rows = load.num_prompts * load.beam_width
        if method == "hf":
            return Usage(rows * (length - 1), rows * -(-length // self.block_size))
        scheduler = local_engine.scheduler_of(self._llm)
        pool = scheduler.kv_cache_manager.block_pool
        computed, peak, in_trie = 0, 0, 0

        def count(output: Any) -> None:
            nonlocal computed, peak, in_trie
            computed += output.total_num_scheduled_tokens
            # One block of the pool is the null block.
            peak = max(peak, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
            groups = scheduler.beam_groups.by_id.values()
            sizes = [load.prompt_len + _trie_size(group.search.generated) for group in groups]
            in_trie = max(in_trie, sum(sizes))

        with each_schedule(self._llm, count):
            self.run(method, load)
        return Usage(computed, peak, in_trie)


def _trie_size(generated: np.ndarray) -> int:
    """Return the nodes of the trie of hypotheses, int64 [hypotheses, tokens]."""
    if not generated.size:
        return 0
    rows = generated[np.lexsort(generated.T[::-1])]
    differ = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    return rows.shape[1] + int(differ.sum())


def _text() -> str:
    import argparse as first
    import textwrap as second
    import typing as third

    return "".join(map(inspect.getsource, (first, second, third)))


def measure(bench: Bench, options: argparse.Namespace, load: Load) -> list[Row]:
    """Return the rows of one load, one for each method."""
    size = load.num_prompts * load.beam_width * load.prompt_len
    with_hf = load.num_prompts == 1 or size <= HF_MAX_TOKENS
    methods = [name for name in options.methods if name != "hf" or with_hf]
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(bench.run, name, load) for name in methods
    }
    usage = {name: bench.usage(name, load) for name in methods}  # this also warms up
    timed = interleave(runs, options.repeats)
    seconds = {name: median_seconds(timed[name]) for name in methods}
    length = load.prompt_len + load.new_tokens
    block_bytes = bench.block_size * bench.kv_bytes
    rows = []
    for name in methods:
        hypotheses = timed[name][0][1]
        peak = usage[name].peak_blocks
        rows.append(
            {
                "method": name,
                **load._asdict(),
                "block_size": bench.block_size,
                "compiled": not options.eager,
                "total_ms": 1e3 * seconds[name],
                "ms_per_step": 1e3 * seconds[name] / load.new_tokens,
                "tokens_per_s": load.num_prompts * load.new_tokens / seconds[name],
                "ratio_to_trie": seconds[name] / seconds["trie"] if "trie" in seconds else None,
                **usage[name]._asdict(),
                "kv_over_greedy": peak / (load.num_prompts * -(-length // bench.block_size)),
                "trie_over_greedy": usage[name].trie_tokens / (load.num_prompts * length) or None,
                "kv_bytes_per_token": peak * block_bytes / (load.num_prompts * length),
                "best_score": bench.score(bench.prompts(load)[0], hypotheses[0][0]),
                "identical_to_hf": (
                    hypotheses == timed["hf"][0][1] if name == "trie" and "hf" in timed else None
                ),
            }
        )
    return rows


def _options() -> argparse.Namespace:
    smoke = {"widths": [2], "prompt_lens": [20], "num_prompts": [1], "tokens": [4]}
    parser = option_parser(__doc__, smoke={**smoke, "eager": True, "kv_cache_gib": 1})
    add_model_option(parser, "model folder; the shipped one if left out")
    parser.add_argument("--wide", action="store_true", help="short, wide searches; see above")
    parser.add_argument("--parts", action="store_true", help="parts of a search; see above")
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--widths", nargs="+", type=int)
    parser.add_argument("--prompt-lens", nargs="+", type=int)
    parser.add_argument("--num-prompts", nargs="+", type=int)
    parser.add_argument("--tokens", nargs="+", type=int, help="new tokens of each hypothesis")
    parser.add_argument("--block-size", type=int, help="tokens of a KV block")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="do not let vLLM compile the model")
    add_device_options(parser)
    options = parser.parse_args()
    if options.parts:
        options.wide, options.methods = True, ["trie"]
    for name, value in (WIDE_DEFAULTS if options.wide else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def run(measure_load: Callable[..., list[Row]], options: argparse.Namespace) -> list[Row]:
    """Measure all loads on the same engines."""
    rows: list[Row] = []
    with local_engine.silence(not options.verbose):
        bench = Bench(options)
        if options.wide:
            smallest = min(options.prompt_lens), min(options.widths), 1, min(options.tokens)
            for name in options.methods:  # warms up
                bench.run(name, Load(*smallest))
    for load in itertools.starmap(
        Load,
        itertools.product(options.prompt_lens, options.widths, options.num_prompts, options.tokens),
    ):
        with local_engine.silence(not options.verbose):
            rows += measure_load(bench, options, load)
        print(f"measured {load}", flush=True)
        write_json(rows, options.json)  # what there is, if the run is cut off
    return rows


def main() -> None:
    options = _options()
    local_engine.set_environment(options.verbose)
    check_device(options.device)
    if options.model is None:
        from vllm_trie.lab.tiny_model import model_path

        options.model = str(model_path())
    measure_load, columns = measure, COLUMNS
    if options.wide:
        measure_load, columns = measure_wide, WIDE_COLUMNS
    if options.parts:
        measure_load, columns = measure_parts, PARTS_COLUMNS
    report(functools.partial(run, measure_load), options, columns)


if __name__ == "__main__":
    main()
