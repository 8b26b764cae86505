"""How often rounding alone would end the check at a start, with a real model in bfloat16.

Decodes random prompts token by token, and computes the same texts in parts of nine tokens, as
verification does. Prints how many of some groups of four prompts each rule would refuse::

    python -m tests.engine.near_ties [PROMPTS [GROUPS]]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from vllm_trie.lab.smollm2 import model_folder
from vllm_trie.vllm_hooks.worker.start_check import NUM_LIKELIEST, near_tie

PROMPT, TOKENS, PART, BATCH = 12, 24, 9, 16


@torch.inference_mode()
def first_differences(model: torch.nn.Module, prompts: torch.Tensor) -> list[tuple[int, float]]:
    """Return the rank and the margin, in plain decoding, of each prompt's first other token; rank 0
    where there is none."""
    output = model(prompts, use_cache=True)
    text, cache = prompts, output.past_key_values
    logits = [output.logits[:, -1]]
    for _ in range(TOKENS - 1):
        text = torch.cat([text, logits[-1].argmax(-1, keepdim=True)], 1)
        output = model(text[:, -1:], past_key_values=cache, use_cache=True)
        logits.append(output.logits[:, -1])
    plain = torch.stack(logits, 1).float().log_softmax(-1)
    output = model(text[:, : PROMPT - 1], use_cache=True)
    cache, parts = output.past_key_values, []
    for part in text[:, PROMPT - 1 :].split(PART, 1):
        output = model(part, past_key_values=cache, use_cache=True)
        parts.append(output.logits)
    others = torch.cat(parts, 1).argmax(-1)
    differences = []
    for expected, tokens in zip(plain, others, strict=True):
        where = (expected.argmax(-1) != tokens).nonzero()
        if not len(where):
            differences.append((0, 0.0))
            continue
        row = expected[where[0, 0]]
        margin = row.max() - row[tokens[where[0, 0]]]
        differences.append((int((row > row[tokens[where[0, 0]]]).sum()), float(margin)))
    return differences


def main() -> None:
    number, groups = [*map(int, sys.argv[1:]), *(640, 400)[len(sys.argv) - 1 :]]
    model = AutoModelForCausalLM.from_pretrained(model_folder("smollm2"), dtype=torch.bfloat16)
    random = np.random.default_rng(0)
    differences: list[tuple[int, float]] = []
    while len(differences) < number:
        prompts = torch.from_numpy(random.integers(0, model.config.vocab_size, (BATCH, PROMPT)))
        differences += first_differences(model, prompts)
    ranks, margins = map(np.array, zip(*differences, strict=True))
    drawn = random.integers(0, len(ranks), (groups, 4))
    print(f"{len(ranks)} prompts, {np.count_nonzero(ranks)} with another token, the largest margin "
          f"{margins.max():.3f}, the largest rank {ranks.max()}")  # fmt: skip
    for most, allowed in ((2, 0.15), (NUM_LIKELIEST, near_tie(torch.bfloat16))):
        refused = (ranks >= most) | (margins > allowed)
        print(f"{most} likeliest, margin {allowed:g}: {refused[drawn].any(1).sum()} of {groups} "
              f"groups refused, {refused.sum()} prompts")  # fmt: skip


if __name__ == "__main__":
    main()
