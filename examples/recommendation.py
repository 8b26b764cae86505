"""Generative recommendation: wide beam search inside a catalogue of a million items, over HTTP.

    python examples/recommendation.py [--model PATH] [--items N] [--width B]
        [further options of vllm serve]

Builds a catalogue of random items of 3 to 5 tokens, serves it, and asks for the best items after
some histories. Every answer is an item: the stop reason of a choice is its id.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from serve_openai_client import serve

from vllm_trie.lab.tiny_model import model_path

CODES = 256
"""Values of each token of an item, as from a residual quantizer."""


def write_catalogue(path: Path, count: int) -> dict[str, list[int]]:
    """Write random items as JSON lines; return tokens by id."""
    rng = np.random.default_rng(0)
    items: dict[tuple[int, ...], str] = {}
    while len(items) < count:
        lengths = rng.integers(3, 6, size=count)
        codes = rng.integers(CODES, size=(count, 5)) + CODES * np.arange(5)
        for tokens, length in zip(codes.tolist(), lengths.tolist(), strict=True):
            items.setdefault(tuple(tokens[:length]), f"sku-{len(items)}")
            if len(items) == count:
                break
    with path.open("w") as file:
        for tokens, name in items.items():
            file.write(json.dumps({"id": name, "tokens": list(tokens)}) + "\n")
    return {name: list(tokens) for tokens, name in items.items()}


def main(model: str, count: int, width: int, further: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, trie = Path(folder) / "items.jsonl", Path(folder) / "items.trie"
        items = write_catalogue(source, count)
        command = [str(Path(sys.executable).with_name("vllm-trie")), "items", "build"]
        subprocess.run([*command, str(source), "-o", str(trie)], check=True)

        additional = {"vllm_trie": {"items": {"catalogue": str(trie)}}}
        options = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
        options += ["--max-num-seqs", str(max(width, 16)), "--kv-cache-memory-bytes", str(1 << 30)]
        options += ["--additional-config", json.dumps(additional), *further]
        with serve(model, *options) as client:
            name = client.models.list().data[0].id
            rng = np.random.default_rng(1)
            # Ids are enough: no texts.
            xargs = {"beam_width": width, "items": "catalogue", "detokenize": 0}
            num_valid = num_answers = 0
            for user in range(4):
                # What the user chose before: the tokens of some items.
                history = [items[f"sku-{n}"] for n in rng.integers(count, size=20)]
                start = time.perf_counter()
                reply = client.completions.create(
                    model=name,
                    prompt=[token for tokens in history for token in tokens],
                    temperature=0,
                    max_tokens=8,
                    n=width,
                    extra_body={"vllm_xargs": xargs},
                )
                answers = [choice.stop_reason for choice in reply.choices]
                num_answers += len(answers)
                num_valid += len(items.keys() & set(answers))
                seconds = time.perf_counter() - start
                print(f"user {user}: {seconds:.2f} s, best {', '.join(map(str, answers[:4]))}")
            print(f"{num_valid} of {num_answers} answers are different items of the catalogue")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    parser.add_argument("--items", type=int, default=1_000_000, help="items of the catalogue")
    parser.add_argument("--width", type=int, default=200, help="beam width")
    arguments, rest = parser.parse_known_args()
    main(arguments.model, arguments.items, arguments.width, rest)
