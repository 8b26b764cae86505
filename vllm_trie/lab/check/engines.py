"""Engines and prompts of the parts that decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from vllm_trie.lab import local_engine
from vllm_trie.lab.check.parts import Settings
from vllm_trie.lab.tiny_model.chat_prompts import chat_prompts, prompt_tokens

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

NODES = 32
"""Nodes of a draft tree; chains take as many tokens at most."""
CHAIN_TOKENS = 8


def prompts(settings: Settings) -> list[list[int]]:
    """Return the demo's prompts as tokens of the model, as chats if it has a chat template."""
    tokenizer = local_engine.load_tokenizer(settings.model)
    encoded = [prompt_tokens(tokenizer, prompt.message) for prompt in chat_prompts()]
    return encoded[::2] if settings.quick else encoded


def start_engine(
    settings: Settings, dtype: str, longest: int, max_tokens: int, **options: object
) -> LLM:
    """Start an engine in this process, with vLLM's defaults on a GPU and uncompiled on a CPU.

    `longest` is the longest prompt's length.
    """
    length = local_engine.room_for(longest, max_tokens, NODES)
    on_gpu = torch.cuda.is_available()
    common: dict[str, Any] = {
        "dtype": dtype,
        "enforce_eager": not on_gpu,
        "max_num_seqs": 8,
        "max_model_len": length,
        # vLLM 0.32 on CPUs ends with an error where a seeded request's prompt is computed in parts.
        "max_num_batched_tokens": 8 * length,
    }
    if on_gpu:
        # The share that has to be free at the start; the KV cache has a size of its own.
        common["gpu_memory_utilization"] = 0.05
    return local_engine.start_engine(settings.model, **common | options)


def decode(
    llm: LLM, texts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[list[list[int]], float]:
    """Decode one batch.

    Returns:
        The output tokens of each prompt, and the tokens that a request got from a step after its
        first one.
    """
    outputs: list[list[int]] = [[] for _ in texts]
    steps = 0
    for step in chain.from_iterable(local_engine.decode_steps(llm, texts, params)):
        outputs[step.prompt] += step.tokens
        steps += bool(step.tokens)
    after_first = sum(map(len, outputs)) - len(outputs)
    return outputs, after_first / max(1, steps - len(outputs))
