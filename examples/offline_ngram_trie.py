"""N-gram-trie speculation with vLLM's offline API, on the model that ships with the package.

    python examples/offline_ngram_trie.py

The plugin needs no import: vLLM loads it by itself, and `method` switches it on.
"""

from __future__ import annotations

from vllm import LLM, SamplingParams

from vllm_trie.tiny_model import model_path

CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, value):
        self.items.append(value)

    def pop(self):
        return self.items.pop()
"""


def main() -> None:
    llm = LLM(
        str(model_path()),  # any model that vLLM serves
        speculative_config={
            "method": "ngram_trie",
            "num_speculative_tokens": 32,  # nodes of a request's draft tree
            # Options of the method go beside it; this is a default.
            "index_output": True,
        },
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,  # the rest of the memory is yours
        enforce_eager=True,  # starts sooner; leave it out to serve
        disable_log_stats=False,  # keeps the counters that are read below
    )
    # An answer that reuses its context, as edits and summaries do, is where n-grams help most.
    messages = [{"role": "user", "content": f"{CODE}\nRename `items` to `entries`."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=128))
    print(output.outputs[0].text)

    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    steps, tokens = counts["vllm:trie_steps"], counts["vllm:trie_tokens"]
    print(f"\n{tokens:.0f} tokens in {steps:.0f} steps of the model")


if __name__ == "__main__":  # vLLM starts its engine in another process, which imports this file
    main()
