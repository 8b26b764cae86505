"""Answers that reuse their context: questions about retrieved passages, and edits of code.

    python examples/rag_and_code_editing.py [--model PATH] [--tensor-parallel-size 2]

Every prompt runs twice on one engine, with and without draft trees (a request can opt out). The
answers are the same; the table shows how many steps of the model the drafts saved. With several
tensor-parallel ranks each holds a part of the model, and all verify the trees of rank 0.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_trie.lab.tiny_model import model_path

PASSAGES = """\
[1] The cache keeps the last 512 answers. When it is full, the oldest answer is dropped.
[2] A request that waits longer than thirty seconds is dropped, and the client gets error 503.
[3] All times in the log file are written in UTC.
"""
CODE = """\
class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, item, amount=1):
        self.items[item] = self.items.get(item, 0) + amount

    def total(self):
        return sum(self.items.values())
"""
PROMPTS = {
    "RAG": [
        f"{PASSAGES}\nWhat happens when the cache is full?",
        f"{PASSAGES}\nRepeat the passage about requests that wait.",
    ],
    "editing": [
        f"{CODE}\nRename `items` to `stock`.",
        f"{CODE}\nAdd docstrings to the functions.",
    ],
}


def accepted_drafts(llm: LLM) -> float:
    """Return the number of output tokens from drafts since the engine started."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:trie_accepted_tokens")


def answer(llm: LLM, prompts: list[str], **extra_args: Any) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=96, extra_args=extra_args)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]


def main(model: str, num_ranks: int) -> None:
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < num_ranks:
        # On CPUs vLLM gives each rank its own NUMA node, and refuses to start with too few.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    llm = LLM(
        model,
        tensor_parallel_size=num_ranks,
        speculative_config={
            "method": "ngram_trie",
            "num_speculative_tokens": 32,
            # Verify every node. The default, "adaptive", weighs accepted tokens against the time
            # of a step, so its counts depend on the machine.
            "node_budget": "fixed",
        },
        dtype="float32",  # in bfloat16 a near-tie may fall the other way in a larger batch
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,  # starts faster; leave it out to serve
        disable_log_stats=False,  # keeps the counters
    )
    rows = []
    for kind, prompts in PROMPTS.items():
        before = accepted_drafts(llm)
        with_trees = answer(llm, prompts)
        drafted = accepted_drafts(llm) - before
        plain = answer(llm, prompts, speculation=False)
        same = all(a.token_ids == b.token_ids for a, b in zip(with_trees, plain, strict=True))
        tokens = sum(len(output.token_ids) for output in with_trees)
        rows.append((kind, tokens, tokens - drafted, tokens / (tokens - drafted), same))
        for prompt, output in zip(prompts, with_trees, strict=True):
            print(f"\n--- {prompt.splitlines()[-1]}\n{output.text.strip()}")

    print(f"\n{'':10}{'tokens':>8}{'steps':>8}{'tokens per step':>18}  same as without drafts")
    for kind, tokens, steps, rate, same in rows:
        print(f"{kind:10}{tokens:8}{steps:8.0f}{rate:18.2f}  {'yes' if same else 'no'}")
    print(f"ranks: {llm.llm_engine.vllm_config.parallel_config.world_size}")


if __name__ == "__main__":  # vLLM starts its ranks in other processes, which import this file
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.model, arguments.tensor_parallel_size)
