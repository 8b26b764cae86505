"""Catalogues of items: the build, and the step of a constrained search.

Items are random: 4 tokens of 256 values each. `build` rows give CPU seconds, the most memory that
the build takes, without pages of files, and bytes per item, for a NumPy array and for JSON lines.
`step` rows give microseconds of one step at the trie's last level but one: the choice among valid
children and, for comparison, the top 2b of every row over the vocabulary, which a search without a
constraint takes. Both exclude the normalizer. `rules` rows give the time of a request's deny-list
of ids, and the microseconds that it adds to a step, without the choice among the children. Whole
searches are in `recommend.py`.

    python benchmarks/items.py --items 1000000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from support.harness import (
    Row,
    interleave,
    median_seconds,
    option_parser,
    report_quietly,
)
from support.wide_beams import random_items

from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.selection import Rules, SelectedTrie, select
from vllm_trie.extras.items.sources import read_items
from vllm_trie.extras.items.trie_file import open_items

COLUMNS = (
    "measure", "items", "form", "build_s", "peak_mb", "open_s", "bytes_per_item",
    "vocabulary", "rules", "select_ms", "beam_width", "step_us", "top_k_us",
)  # fmt: skip
LENGTH, VALUES = 4, 256


def write_sources(folder: Path, count: int) -> dict[str, Path]:
    array = random_items(count, LENGTH, VALUES)
    np.save(folder / "items.npy", array)
    with (folder / "items.jsonl").open("w") as file:
        for number, tokens in enumerate(array.tolist()):
            file.write(json.dumps({"id": f"item-{number}", "tokens": tokens}) + "\n")
    return {"npy": folder / "items.npy", "jsonl": folder / "items.jsonl"}


def anonymous_mb() -> float:
    """Return the process' memory without pages of files, which the system can take back."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def build_in_process(source: Path, target: Path) -> None:
    """Build a trie; print the CPU seconds and the most memory above that of the start, MB."""
    before = peak = anonymous_mb()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.process_time()
    build_items(target, read_items(source))
    seconds = time.process_time() - start
    done.set()
    watcher.join()
    print(json.dumps({"build_s": seconds, "peak_mb": peak - before}))


def measure_build(form: str, source: Path, target: Path) -> Row:
    command = [sys.executable, __file__, "--build", str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    start = time.perf_counter()
    trie = open_items(target)
    opened = time.perf_counter() - start
    return {
        "measure": "build", "items": trie.num_items, "form": form, **json.loads(done.stdout),
        "open_s": opened, "bytes_per_item": target.stat().st_size / trie.num_items,
    }  # fmt: skip


def measure_step(path: Path, vocabulary: int, width: int, repeats: int) -> Row:
    import torch

    from vllm_trie.extras.items.step import ItemStep, best_continuations

    trie = open_items(path)
    nodes = np.array([0], dtype=np.int32)
    for _ in range(LENGTH - 2):
        nodes = trie.children(nodes).nodes
        nodes = np.random.default_rng(0).choice(nodes, size=min(width, len(nodes)), replace=False)
    logits = torch.randn(len(nodes), vocabulary, generator=torch.Generator().manual_seed(0))
    totals = np.zeros(len(nodes), dtype=np.float32)
    runs = {
        # The normalizer is the same work for both; over the valid tokens it is next to nothing.
        "step": lambda: best_continuations(
            [trie], [ItemStep(nodes, totals, width)], logits, "valid"
        ).fetch(),
        "top_k": lambda: logits.topk(min(2 * width, vocabulary)),
    }
    timed = interleave(runs, repeats)
    return {
        "measure": "step", "items": trie.num_items, "vocabulary": vocabulary, "beam_width": width,
        "step_us": 1e6 * median_seconds(timed["step"]),
        "top_k_us": 1e6 * median_seconds(timed["top_k"]),
    }  # fmt: skip


def measure_rules(path: Path, count: int, repeats: int) -> Row:
    trie = open_items(path)
    rng = np.random.default_rng(0)
    numbers = rng.integers(trie.num_items, size=count).tolist()
    rules = Rules(deny_items=[f"item-{number}" for number in numbers])
    whole = SelectedTrie(trie, select(trie, rules))
    pairs = trie.children(trie.children(np.array([0])).nodes).nodes
    nodes = rng.choice(pairs, size=400, replace=False)
    runs = {
        "select": lambda: select(trie, rules),
        "plain": lambda: trie.has_children(trie.children(nodes).nodes),
        "selected": lambda: whole.has_children(whole.children(nodes).nodes),
    }
    timed = interleave(runs, 3 * repeats)
    plain, selected = (1e6 * median_seconds(timed[name]) for name in ("plain", "selected"))
    return {
        "measure": "rules", "items": trie.num_items, "rules": count, "beam_width": len(nodes),
        "select_ms": 1e3 * median_seconds(timed["select"]), "step_us": selected - plain,
    }  # fmt: skip


def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "items.trie"
        for form, source in write_sources(Path(name), options.items).items():
            rows.append(measure_build(form, source, target))
            source.unlink()
        if options.only_build:
            return rows
        for vocabulary in (2048, 32_000):
            for width in options.widths:
                rows.append(measure_step(target, vocabulary, width, 3 * options.repeats))
        rows += [measure_rules(target, count, options.repeats) for count in (100, 1000, 4096)]
    return rows


def main() -> None:
    parser = option_parser(__doc__, smoke={"items": 20_000, "widths": [4]})
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 200, 400])
    parser.add_argument("--only-build", action="store_true", help="skip steps and rules")
    parser.add_argument("--build", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build_in_process(*options.build)
        return
    report_quietly(run, options, COLUMNS)


if __name__ == "__main__":
    main()
