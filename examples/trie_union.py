"""N-grams and Medusa heads in one tree.

    python examples/trie_union.py [--model PATH --heads PATH]

N-grams of the context and trained heads predict different tokens. `trie_union` drafts from both,
and verifies the likeliest nodes.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from vllm_trie.lab.tiny_model import medusa_path, model_path

REQUESTS = (
    # An answer that copies its context, one that hardly does, and new code.
    "def area(width, height):\n    return width * height\n\nRename `width` to `breadth`.",
    "What is a dictionary in Python?",
    "Write a class `Timer` with methods `start` and `stop`.",
)


def main(model: str, heads: str) -> None:
    llm = LLM(
        model,
        speculative_config={
            "method": "trie_union",
            "drafters": ["ngram_trie", "medusa"],
            "model": heads,
            "num_speculative_tokens": 32,  # nodes of a request's tree
            # Options of a part go under its name; this is the default.
            "options": {"medusa": {"top_tokens": 32}},
        },
        max_model_len=1024,
        # Leaves the rest of the memory free; room for two sequences of an 8B model.
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,  # starts faster; leave it out to serve
        disable_log_stats=False,  # keeps the counters read below
    )
    messages = [[{"role": "user", "content": request}] for request in REQUESTS]
    for output in llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=96)):
        print(output.outputs[0].text, end="\n\n")

    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    steps, tokens = counts["vllm:trie_steps"], counts["vllm:trie_tokens"]
    print(f"{tokens:.0f} tokens in {steps:.0f} steps of the model")


if __name__ == "__main__":  # vLLM starts its engine in another process, which imports this file
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    parser.add_argument("--heads", default=str(medusa_path()), help="Medusa heads of the model")
    arguments = parser.parse_args()
    main(arguments.model, arguments.heads)
