"""N-gram-trie speculation with vLLM's offline API: a batch of chats.

    python examples/offline_ngram_trie.py [--model PATH]

vLLM loads the plugin without an import; `method` switches it on.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from vllm_trie.lab.tiny_model import model_path

CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, value):
        self.items.append(value)

    def pop(self):
        return self.items.pop()
"""
# N-grams help most where answers reuse their context, as edits and summaries do.
REQUESTS = ("Rename `items` to `entries`.", "Show me `push`.", "Which classes are defined here?")


def main(model: str) -> None:
    llm = LLM(
        model,
        speculative_config={
            "method": "ngram_trie",
            "num_speculative_tokens": 32,  # nodes of a request's draft tree
            # Options of the method go next to it; this is the default.
            "index_output": True,
        },
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,  # leaves the rest of the memory free
        enforce_eager=True,  # starts faster; leave it out to serve
        disable_log_stats=False,  # keeps the counters read below
    )
    chats = [[{"role": "user", "content": f"{CODE}\n{request}"}] for request in REQUESTS]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=96))
    for request, output in zip(REQUESTS, outputs, strict=True):
        print(f"\n--- {request}\n{output.outputs[0].text.strip()}")

    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    steps, tokens = counts["vllm:trie_steps"], counts["vllm:trie_tokens"]
    print(f"\n{tokens:.0f} tokens in {steps:.0f} steps of the model")


if __name__ == "__main__":  # vLLM starts its engine in another process, which imports this file
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    main(parser.parse_args().model)
