"""A trained drafter on Model Runner V2: its chain, its tree, n-grams, and all in one tree.

One engine decodes the shipped model greedily with the EAGLE head that ships, on a CPU with kernels
in Triton's interpreter; methods take turns in it. The prompts are those of `benchmarks/medusa.py`.
Prints tokens per step of a request, by nodes.

    python -m tests.engine.v2_trained [PROMPTS [HEADS]]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

from vllm import SamplingParams

from tests.engine.v2_run import engine
from tests.processes import ROOT
from vllm_trie.drafts import DraftRequest, get_drafter_class, parse_options
from vllm_trie.lab.local_engine import runner_of, trees_of
from vllm_trie.lab.tiny_model import eagle_path, model_path
from vllm_trie.tree import TokenTree

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, detokenize=False)
NODES = (8, 16, 32)
NO_TEXT = {"index_tokens": 0, "store_tokens": 0, "recycle": False}
WITH_TEXT = {"store_tokens": 0}
METHODS = {
    "chain": (True, NO_TEXT),
    "tree": (True, NO_TEXT),
    "ngrams": (False, WITH_TEXT),
    "all": (True, WITH_TEXT),
}
"""Whether the head drafts, and the n-grams' options."""


def put_in(llm: Any, method: str, nodes: int, entry: dict[str, Any], heads: Any) -> None:
    """Let an engine draft with a method."""
    runner_of(llm).adapter.draft()  # after the step before
    guard = trees_of(llm).guard
    has_heads, text = METHODS[method]
    options = {"drafters": ["ngram", entry], "options": {"ngram": text}}
    drafter = get_drafter_class("trie_union")(
        parse_options("trie_union", options), guard.drafter.context
    )
    drafter.heads = heads if has_heads else None
    stock = drafter.propose

    def propose(requests: Sequence[DraftRequest]) -> list[TokenTree]:
        for request in requests:
            request.max_nodes = min(request.max_nodes, nodes)
            request.chain_only |= method == "chain"
        return stock(requests)

    drafter.propose = propose
    guard.drafter = drafter


def main() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    from support.prompts import code_prompts

    count, num_heads = (*map(int, sys.argv[1:]), *(12, 4)[len(sys.argv) - 1 :])
    v2_on_cpu.use_v2(True)
    prompts = [
        {"prompt_token_ids": prompt}
        for group in code_prompts(str(model_path())).values()
        for prompt in group
    ]
    prompts = prompts[:: max(1, len(prompts) // count)][:count]
    entry = {"method": "eagle", "model": str(eagle_path()), "num_speculative_tokens": num_heads}
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    room = {
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 8 * -(-(longest + 120) // 32) + 1,
        "max_num_batched_tokens": 512,
        "max_model_len": longest + 112,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
    }
    plain = engine(**room).generate(prompts, GREEDY, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in plain]
    union = {"method": "trie_union", "drafters": ["ngram", entry], "node_budget": "fixed"}
    union |= {"num_speculative_tokens": max(NODES), "verification": "tree"}
    llm = engine(speculative_config=union, **room)
    heads, totals = trees_of(llm).guard.drafter.heads, trees_of(llm).totals
    result: dict[str, dict[int, float]] = {}
    for method in METHODS:
        for nodes in NODES:
            put_in(llm, method, nodes, entry, heads)
            steps, tokens = totals.steps, totals.tokens
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            rate = (totals.tokens - tokens) / (totals.steps - steps)
            result.setdefault(method, {})[nodes] = round(rate, 3)
            print(method, nodes, result[method][nodes], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
