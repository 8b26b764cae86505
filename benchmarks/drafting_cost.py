"""Cost of drafting by n-grams on one core: indexing, appending, drafting, drafting in batches.

    python benchmarks/drafting_cost.py --json cost.json

The text is synthetic: phrases drawn from a fixed stock, which repeat themselves as real text does
(`--text FILE` takes a real one). Times are medians over interleaved repeats.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from support.harness import Row, print_table, write_json
from support.replay_data import DEFAULT_TOKENIZER, load_tokenizer

from vllm_trie.drafters.ngram_trie.drafter import BLEND
from vllm_trie.ngrams import MAX_ORDER, Index, Job, NativeBackend

NUM_TOKENS = 4096
NUM_NODES = 32
BATCH_SIZE = 32
LIMITS = {
    "index_prompt_ms": 3.0,
    "append_token_us": 3.0,
    "draft_us": 50.0,
    "batch_ms": 1.5,
}
"""Requirements for a prompt of 4,096 tokens, a draft of 32 nodes in it, 32 such requests."""


def synthetic_text(size: int, seed: int) -> np.ndarray:
    """Return int32 [size]: phrases of 2 to 12 tokens with Zipf-like frequencies."""
    random = np.random.default_rng(seed)
    stock = [
        (32_000 * random.random(random.integers(2, 13)) ** 4).astype(np.int32) for _ in range(3000)
    ]
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < size:
        pieces.append(stock[min(int(random.pareto(0.7)), len(stock) - 1)])
    return np.concatenate(pieces)[:size]


def draft(backend: NativeBackend, index: Index, tokens: np.ndarray, store: Index | None) -> float:
    """Return the microseconds of one draft of an indexed text."""
    job = Job(index, store, None, tokens, len(tokens), NUM_NODES, 1 << 20, False)
    begin = time.perf_counter()
    backend.draft_batch([job])
    return 1e6 * (time.perf_counter() - begin)


def measure(texts: list[np.ndarray], store_text: np.ndarray) -> tuple[dict[str, float], Index]:
    """Run every measurement once; return the results by name, and the index of a text."""
    backend = NativeBackend(BLEND)
    store = backend.new_index(MAX_ORDER)
    store.add_text(store_text)
    index = backend.new_index(MAX_ORDER)
    begin = time.perf_counter()
    index.add_text(texts[0])
    times = {"index_prompt_ms": 1e3 * (time.perf_counter() - begin)}

    # Append five tokens a step, as speculation does; the draft is timed without them.
    index = backend.new_index(MAX_ORDER)
    size = NUM_TOKENS - 500
    draft(backend, index, texts[0][:size], None)
    appends, drafts, drafts_with_store = [], [], []
    while size < NUM_TOKENS:
        size += 5
        with_append = draft(backend, index, texts[0][:size], None)
        drafts.append(draft(backend, index, texts[0][:size], None))
        drafts_with_store.append(draft(backend, index, texts[0][:size], store))
        appends.append((with_append - drafts[-1]) / 5)
    times["append_token_us"] = statistics.median(appends)
    times["draft_us"] = statistics.median(drafts)
    times["draft_with_store_us"] = statistics.median(drafts_with_store)

    owns = [backend.new_index(MAX_ORDER) for _ in texts]
    jobs = [
        Job(one, None, None, text, len(text), NUM_NODES, 1 << 20, False)
        for one, text in zip(owns, texts, strict=True)
    ]
    backend.draft_batch(jobs)
    for name, shared in (("batch_ms", None), ("batch_with_store_ms", store)):
        jobs = [job._replace(store=shared) for job in jobs]
        begin = time.perf_counter()
        backend.draft_batch(jobs)
        times[name] = 1e3 * (time.perf_counter() - begin)
    return times, index


def main(
    text: Annotated[Path | None, typer.Option(exists=True, help="A text to draft in.")] = None,
    tokenizer: Annotated[str, typer.Option(help="Its tokenizer.")] = DEFAULT_TOKENIZER,
    repeats: Annotated[int, typer.Option(help="Repeats; medians are reported.")] = 15,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Where to write the rows.")
    ] = None,
) -> None:
    """Measure the cost of drafting."""
    if text is None:
        texts = [synthetic_text(NUM_TOKENS, seed) for seed in range(BATCH_SIZE)]
        store_text = synthetic_text(16 * NUM_TOKENS, 1000)
    else:
        tokens = load_tokenizer(tokenizer).encode(text.read_text(), False)
        if len(tokens) < 2 * NUM_TOKENS:
            raise typer.BadParameter(f"--text has {len(tokens)} tokens, {2 * NUM_TOKENS} needed")
        array = np.array(tokens, dtype=np.int32)
        starts = np.linspace(0, len(array) - NUM_TOKENS, BATCH_SIZE).astype(int)
        texts = [array[start : start + NUM_TOKENS] for start in starts]
        store_text = array[NUM_TOKENS:]
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        measured, index = measure(texts, store_text)
        for name, value in measured.items():
            times[name].append(value)
    rows: list[Row] = [
        {"measure": name, "value": statistics.median(values), "limit": LIMITS.get(name)}
        for name, values in times.items()
    ]
    size = index.num_bytes / index.num_tokens
    rows.append({"measure": "bytes_per_token", "value": size, "limit": None})
    print_table(("measure", "value", "limit"), (row.values() for row in rows))
    write_json(rows, json_out)


if __name__ == "__main__":
    typer.run(main)
