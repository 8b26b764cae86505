"""Draft trees on two tensor-parallel ranks.

    python examples/tensor_parallel.py [--model PATH]

Only `tensor_parallel_size` changes. Each rank holds half of the model, and both verify the trees of
rank 0.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_trie.lab.tiny_model import model_path

CODE = """\
class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, item, amount=1):
        self.items[item] = self.items.get(item, 0) + amount
"""
REQUESTS = ("Rename `items` to `stock`.", "Add docstrings to the functions.")


def main(model: str) -> None:
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        # On CPUs vLLM gives each rank its own NUMA node, and refuses to start with too few.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    llm = LLM(
        model,
        tensor_parallel_size=2,
        speculative_config={
            "method": "ngram_trie",
            "num_speculative_tokens": 32,
            "node_budget": "fixed",  # verify every node: the same counts on every machine
        },
        dtype="float32",  # in bfloat16 a near-tie may fall the other way in a larger batch
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        disable_log_stats=False,
    )
    chats = [[{"role": "user", "content": f"{CODE}\n{request}"}] for request in REQUESTS]
    with_trees, plain = (
        [
            output.outputs[0]
            for output in llm.chat(
                chats, SamplingParams(temperature=0.0, max_tokens=96, extra_args=extra)
            )
        ]
        for extra in ({}, {"speculation": False})
    )
    for request, output in zip(REQUESTS, with_trees, strict=True):
        print(f"\n--- {request}\n{output.text.strip()}")

    accepted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:trie_accepted_tokens")
    tokens = sum(len(output.token_ids) for output in with_trees)
    same = all(a.token_ids == b.token_ids for a, b in zip(with_trees, plain, strict=True))
    print(f"\non {llm.llm_engine.vllm_config.parallel_config.world_size} ranks: ", end="")
    print(f"{accepted:.0f} of {tokens} tokens came from drafts")
    print(f"same as without drafts: {'yes' if same else 'no'}")


if __name__ == "__main__":  # vLLM starts the ranks in other processes, which import this file
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    main(parser.parse_args().model)
