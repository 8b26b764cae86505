"""Drafting with a method from another package.

pip install examples/own_drafter
python examples/own_drafter/run.py [--model PATH]
vllm serve MODEL --spec-method paper_ngram_trie
"""

from __future__ import annotations

import argparse
import sys

from vllm import LLM, SamplingParams

from vllm_trie.drafters import available_methods
from vllm_trie.lab.tiny_model import model_path

METHOD = "paper_ngram_trie"
CODE = """\
def net_price(lines):
    total = 0
    for line in lines:
        total += line.price * line.quantity
    return total
"""


def main(model: str) -> None:
    if METHOD not in available_methods():
        sys.exit(f"the method {METHOD} is not installed; run: pip install examples/own_drafter")
    llm = LLM(
        model,
        speculative_config={
            "method": METHOD,
            "num_speculative_tokens": 16,
            "max_prefix_len": 2,  # the drafter's own option
            "node_budget": "fixed",  # verify every node: the same counts on every machine
        },
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        disable_log_stats=False,
    )
    chat = [{"role": "user", "content": f"{CODE}\nrepeat the code"}]
    with_trees, plain = (
        llm.chat(chat, SamplingParams(temperature=0.0, max_tokens=64, extra_args=extra))
        for extra in ({}, {"speculation": False})
    )
    drafted, undrafted = with_trees[0].outputs[0], plain[0].outputs[0]
    accepted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:trie_accepted_tokens")
    print(drafted.text)
    print(f"\n{METHOD}: {accepted:.0f} of {len(drafted.token_ids)} tokens came from drafts")
    print(f"same as without drafts: {'yes' if drafted.token_ids == undrafted.token_ids else 'no'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    main(parser.parse_args().model)
