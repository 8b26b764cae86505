"""A loop of GRPO's shape without the training: the same prompts over epochs, n samples each.

    python examples/rl/rollouts.py [--model PATH] [--store redis://HOST:6379/0]

Drafts come from the samples of earlier epochs and of other replicas. They change no sample's
distribution, so the loop is the one without them.
"""

from __future__ import annotations

import argparse
from statistics import mean, pstdev

from vllm import LLM, RequestOutput, SamplingParams

from vllm_trie.lab.tiny_model import model_path

TASKS = ("Write a function that adds two numbers.", "Write a function that sorts words.")
SAMPLES = 8


def reward(text: str) -> float:
    """Stand in for a check of the answer: short functions are good."""
    return float("def " in text) - len(text) / 1000


def advantages(group: RequestOutput) -> list[float]:
    """Return each sample's reward in relation to its group's, as GRPO does."""
    rewards = [reward(sample.text) for sample in group.outputs]
    return [(r - mean(rewards)) / (pstdev(rewards) + 1e-6) for r in rewards]


def main(model: str, epochs: int, store: str | None) -> None:
    drafts = {
        "method": "ngram_trie",
        "num_speculative_tokens": 16,
        "node_budget": "fixed",  # verify every node: the same counts on every machine
    }
    llm = LLM(
        model,
        speculative_config=drafts if store is None else {**drafts, "store": store},
        max_model_len=512,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        disable_log_stats=False,  # keeps the counters read below
    )
    chats = [[{"role": "user", "content": task}] for task in TASKS]
    before = 0.0, 0.0
    for epoch in range(epochs):
        params = SamplingParams(n=SAMPLES, temperature=0.6, max_tokens=64, seed=epoch)
        groups = llm.chat(chats, params, use_tqdm=False)
        weights = [advantages(group) for group in groups]
        # Here a trainer takes a step with the samples and their weights, and sends the new
        # parameters: llm.update_weights(...), or llm.collective_rpc("reload_weights"). Drafts stay.
        llm.reset_prefix_cache()
        counts = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
        tokens, steps = counts["vllm:trie_tokens"], counts["vllm:trie_steps"]
        rate = (tokens - before[0]) / (steps - before[1])
        before = tokens, steps
        best = max(max(group) for group in weights)
        print(f"epoch {epoch}: {rate:.2f} tokens per step, best advantage {best:.2f}")
    llm.collective_rpc("reset_drafts")  # for another policy; nothing else empties the memory


if __name__ == "__main__":  # vLLM starts its engine in another process, which imports this file
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any chat model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--store", help="a Redis or Valkey server, to share with replicas")
    arguments = parser.parse_args()
    main(arguments.model, arguments.epochs, arguments.store)
