"""KV memory of beam search: this project's, Hugging Face's, and as many separate sequences.

The headline of "Efficient Beam Search for LLMs Using Trie-Based Decoding" is Mem/Tok: peak bytes of
KV over the tokens of the prompt and of one output. Here it is `kv_tokens_per_token`, in units of
one token's KV, so that a greedy request without waste has 1. All decode the same prompts to the
same length.

    trie       this project's search: KV blocks in use at the peak
    separate   one request for each hypothesis, which share nothing: KV blocks in use at the peak
    hf         `transformers`' `generate(num_beams=b)`: bytes of the cache that it returns

`best_score` is the length-normalized score of the best hypothesis. `blocks` in the rows of `trie`
are the blocks in use at each step; a table of them ends the output, for the longest prompt and the
largest width.

    python benchmarks/beam_memory.py --model MODEL --dtype bfloat16 --json OUT
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

from support.engines import each_schedule, scheduler_of
from support.harness import Row, finish, option_parser, run_quietly, write_json

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "prompt_len", "beam_width", "block_size", "peak_blocks", "kv_mib",
    "kv_tokens_per_token", "seconds", "tokens_per_s", "best_score",
)  # fmt: skip
METHODS = ("trie", "separate", "hf")
LENGTHS = (1, 2, 4, 8, 16, 20, 32, 52, 64)
"""Generated lengths of the table of memory."""


def prompt_tokens(model: str, length: int) -> list[int]:
    """Return the beginning of a module's source, the same for every method."""
    import argparse as module
    import inspect

    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(model).encode(inspect.getsource(module))
    if len(tokens) < length:
        raise SystemExit(f"--prompt-lens {length}: the text has {len(tokens)} tokens")
    return tokens[:length]


def token_bytes(model: str, dtype: str) -> int:
    """Return the bytes of KV that one token takes in all layers."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    size: int = getattr(torch, dtype).itemsize
    return 2 * size * config.num_hidden_layers * config.num_key_value_heads * head_size


class Engine:
    """An engine whose KV blocks are counted at each step."""

    def __init__(self, options: argparse.Namespace, block_size: int) -> None:
        length = max(options.prompt_lens) + options.tokens
        slots = max(options.widths) * (length + block_size)
        self._llm = local_engine.start_engine(
            options.model,
            max_model_len=length + block_size,
            max_num_seqs=max(options.widths),
            dtype=options.dtype,
            block_size=block_size,
            kv_cache_memory_bytes=slots * token_bytes(options.model, options.dtype) * 5 // 4,
        )

    def run(self, method: str, prompt: list[int], width: int, tokens: int) -> Row:
        """Decode; return the figures of the run."""
        from vllm import SamplingParams

        greedy = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        prompts: list[dict[str, Any]]
        if method == "trie":
            prompts = [{"prompt_token_ids": prompt}]
            params = SamplingParams(n=width, extra_args={"beam_width": width}, **greedy)
        else:  # a salt of its own keeps a request from sharing blocks
            prompts = [{"prompt_token_ids": prompt, "cache_salt": str(i)} for i in range(width)]
            params = SamplingParams(**greedy)
        pool = scheduler_of(self._llm).kv_cache_manager.block_pool
        blocks: list[int] = []

        def count(output: Any) -> None:
            # One block of the pool is the null block.
            blocks.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

        self._llm.reset_prefix_cache()
        begin = time.perf_counter()
        with each_schedule(self._llm, count):
            results = self._llm.generate(prompts, params, use_tqdm=False)
        row: Row = {"seconds": time.perf_counter() - begin, "peak_blocks": max(blocks)}
        if method == "trie":
            best = results[0].outputs[0]
            row |= {"best_score": best.score, "blocks": blocks}
        return row


class HuggingFace:
    """Beam search of `transformers`."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, options.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()

    def run(self, prompt: list[int], width: int, tokens: int) -> Row:
        """Decode; return the figures of the run."""
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(
            num_beams=width,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        self._model.generation_config.eos_token_id = None
        inputs = torch.tensor([prompt])
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), generation_config=config
            )
        seconds = time.perf_counter() - begin
        layers = output.past_key_values.layers
        cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        scores = getattr(output, "sequences_scores", None)
        best = None if scores is None else scores[0].item()
        return {"seconds": seconds, "kv_bytes": cache_bytes, "best_score": best}


def measure(options: argparse.Namespace) -> list[Row]:
    """Return a row for each method, width, prompt and, where there are blocks, size of a block."""
    rows: list[Row] = []
    per_token = token_bytes(options.model, options.dtype)

    def add(method: str, block_size: int | None, run: Any) -> None:
        for length in options.prompt_lens:
            prompt = prompt_tokens(options.model, length)
            run(prompt[: min(options.prompt_lens)], min(options.widths))  # warms up
            for width in options.widths:
                row = run(prompt, width)
                if block_size is not None:
                    row["kv_bytes"] = row["peak_blocks"] * block_size * per_token
                # The last token of an output has no KV.
                length_of_one = length + options.tokens - 1
                rows.append(
                    {
                        "method": method,
                        "prompt_len": length,
                        "beam_width": width,
                        "new_tokens": options.tokens,
                        "block_size": block_size,
                        "kv_mib": row["kv_bytes"] / (1 << 20),
                        "kv_tokens_per_token": row["kv_bytes"] / (per_token * length_of_one),
                        "tokens_per_s": width * options.tokens / row["seconds"],
                        **row,
                    }
                )
                write_json(rows, options.json)  # what there is, if the run is cut off

    for block_size in options.block_sizes:
        methods = [name for name in options.methods if name != "hf"]
        if block_size != options.block_sizes[0] and "separate" in methods:
            methods.remove("separate")  # their blocks follow from their lengths
        if not methods:
            continue
        engine = Engine(options, block_size)
        for name in methods:
            add(
                name,
                block_size,
                lambda prompt, width, engine=engine, name=name: engine.run(
                    name, prompt, width, options.tokens
                ),
            )
        del engine
        gc.collect()
    if "hf" in options.methods:
        hf = HuggingFace(options)
        add("hf", None, lambda prompt, width: hf.run(prompt, width, options.tokens))
    return rows


def by_length(rows: list[Row], lengths: Sequence[int]) -> Iterator[str]:
    """Yield a Markdown table of MiB of KV in use over the generated length.

    Separate sequences have the blocks that their lengths need.
    """
    widest = max(rows, key=lambda row: (row["prompt_len"], row["beam_width"]))
    prompt, width = widest["prompt_len"], widest["beam_width"]
    yield " | ".join(["| MiB of KV by generated tokens", *map(str, lengths)]) + " |"
    yield "| --- " * (len(lengths) + 1) + "|"
    for row in rows:
        size = row["block_size"]
        if (row["prompt_len"], row["beam_width"]) != (prompt, width) or size is None:
            continue
        mib = row["kv_mib"] / row["peak_blocks"]
        if row["method"] == "trie":
            name, blocks = f"blocks of {size}", row["blocks"][-row["new_tokens"] :]
        else:  # the last token has no KV
            name = "separate sequences"
            blocks = [width * -((prompt + i) // -size) for i in range(row["new_tokens"])]
        values = (f"{blocks[length - 1] * mib:.1f}" for length in lengths if length <= len(blocks))
        yield " | ".join([f"| {name}", *values]) + " |"


def main() -> None:
    """Measure and print."""
    smoke = {"widths": [1, 2], "prompt_lens": [20], "block_sizes": [32], "tokens": 4}
    parser = option_parser(__doc__, repeats=1, smoke=smoke)
    parser.add_argument("--model", help="model folder; the shipped one if left out")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 3, 9, 15])
    parser.add_argument("--prompt-lens", nargs="+", type=int, default=[181, 910])
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each hypothesis")
    options = parser.parse_args()
    if options.model is None:
        from vllm_trie.lab.tiny_model import model_path

        options.model = str(model_path())
    rows = run_quietly(measure, options)
    finish(rows, options.json, COLUMNS)
    print("\n".join(by_length(rows, LENGTHS)))


if __name__ == "__main__":
    main()
