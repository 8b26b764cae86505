"""Drafts without a second model, with vLLM's offline API: a batch of chats.

    python examples/offline.py [--model PATH] [--method lookahead_trie]
    python examples/offline.py --method trie_union [--model PATH --heads PATH]

vLLM loads the plugin without an import; `method` switches it on. `ngram_trie` drafts what the
context repeats, `lookahead_trie` lets the model guess ahead where little repeats, and `trie_union`
puts n-grams and the guesses of Medusa heads in one tree.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from vllm_trie.lab.tiny_model import medusa_path, model_path

CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, value):
        self.items.append(value)

    def pop(self):
        return self.items.pop()
"""
# Two answers reuse their context, as edits and summaries do; the last is new text.
REQUESTS = ("Rename `items` to `entries`.", "Show me `push`.", "Write a function that sorts words.")
OPTIONS = {
    # `num_speculative_tokens` are the nodes of a request's draft tree. A method's own options stand
    # next to it; this one is the default.
    "ngram_trie": {"num_speculative_tokens": 32, "index_output": True},
    # 39 nodes for the window, the rest for the candidates.
    "lookahead_trie": {"num_speculative_tokens": 59},
    # Options of a part go under its name; this one is the default.
    "trie_union": {
        "num_speculative_tokens": 32,
        "drafters": ["ngram_trie", "medusa"],
        "options": {"medusa": {"top_tokens": 32}},
    },
}


def main(model: str, method: str, heads: str) -> None:
    weights = {"model": heads} if method == "trie_union" else {}
    llm = LLM(
        model,
        speculative_config={"method": method, **OPTIONS[method], **weights},
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
    print(f"\n{method}: {tokens:.0f} tokens in {steps:.0f} steps of the model")


if __name__ == "__main__":  # vLLM starts its engine in another process, which imports this file
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    parser.add_argument("--method", default="ngram_trie", choices=OPTIONS)
    parser.add_argument("--heads", default=str(medusa_path()), help="Medusa heads of the model")
    arguments = parser.parse_args()
    main(arguments.model, arguments.method, arguments.heads)
