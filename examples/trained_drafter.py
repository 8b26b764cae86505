"""One of vLLM's trained drafters, an EAGLE head, and n-grams in one tree.

    python examples/trained_drafter.py [--model PATH --head PATH]

The EAGLE head drafts a chain where the answer is new; where it copies its context, n-grams draft
alone.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from vllm_trie.lab.tiny_model import eagle_path, model_path

REQUESTS = (
    # An answer that copies its context, one that hardly does, and new code.
    "def area(width, height):\n    return width * height\n\nRename `width` to `breadth`.",
    "What is a dictionary in Python?",
    "Write a class `Timer` with methods `start` and `stop`.",
)


def main(model: str, head: str) -> None:
    llm = LLM(
        model,
        speculative_config={
            "method": "trie_union",
            "drafters": [
                "ngram_trie",
                # An entry as vLLM's own speculative configuration: eagle, eagle3, mtp, draft_model.
                {"method": "eagle", "model": head, "num_speculative_tokens": 4},
            ],
            "num_speculative_tokens": 32,  # nodes of a request's tree, all drafters together
        },
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,  # leaves the rest of the memory free
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
    parser.add_argument("--head", default=str(eagle_path()), help="an EAGLE head of the model")
    arguments = parser.parse_args()
    main(arguments.model, arguments.head)
