"""Drafts from text outside of the request: a corpus, and what an earlier engine has generated.

    python examples/corpus_and_warm_start.py [--model PATH]

A corpus is a file of text that answers resemble, here a module of code; `vllm-trie corpus
synthesize` makes one from the model's own answers. With a folder as `store_path` an engine saves
its outputs, and the next one starts with them.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_trie.lab.tiny_model import model_path

QUESTIONS = ("Write a function `dedent(text)`.", "Write a class `Wrapper` for lines of text.")


def tokens_per_step(model: str, corpus: Path, store: Path) -> float:
    """Answer the questions with an engine of its own."""
    llm = LLM(
        model,
        speculative_config={
            "method": "ngram_trie",
            "num_speculative_tokens": 32,
            "corpus": str(corpus),
            "store_path": str(store),
            "node_budget": "fixed",  # verify every node: the same counts on every machine
        },
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,  # starts faster; leave it out to serve
        disable_log_stats=False,  # keeps the counters read below
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    # The store is saved once a minute and at the shutdown, as a server's with --shutdown-timeout.
    llm.llm_engine.engine_core.shutdown(timeout=60)
    return counts["vllm:trie_tokens"] / counts["vllm:trie_steps"]


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text, corpus, store = (Path(folder) / name for name in ("text.txt", "corpus", "store"))
        text.write_text(inspect.getsource(textwrap))
        command = [str(Path(sys.executable).with_name("vllm-trie")), "corpus", "build"]
        subprocess.run([*command, str(text), "-o", str(corpus), "--tokenizer", model], check=True)
        for start in ("first", "second"):
            print(f"{start} start: {tokens_per_step(model, corpus, store):.2f} tokens per step")


if __name__ == "__main__":  # vLLM starts its engine in another process, which imports this file
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    main(parser.parse_args().model)
