"""Engines and prompts of the parts that decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_trie.lab import local_engine
from vllm_trie.lab.check.parts import Settings
from vllm_trie.lab.tiny_model.chat_prompts import chat_prompts, chat_tokens

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

NODES = 32
"""Nodes of a draft tree; chains take as many tokens at most."""
CHAIN_TOKENS = 8


def prompts(settings: Settings) -> list[list[int]]:
    """Return the demo's prompts as tokens of the model, as chats if it has a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    encode = (
        chat_tokens if tokenizer.chat_template else lambda tokenizer, text: tokenizer.encode(text)
    )
    encoded = [list(encode(tokenizer, prompt.message)) for prompt in chat_prompts()]
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
    from vllm.sampling_params import RequestOutputKind

    outputs: list[list[int]] = [[] for _ in texts]
    steps = 0
    for index, (text, given) in enumerate(zip(texts, params, strict=True)):
        request_params = given.clone()
        request_params.output_kind = RequestOutputKind.DELTA
        llm.llm_engine.add_request(
            f"prompt-{index}", {"prompt_token_ids": list(text)}, request_params
        )
    while llm.llm_engine.has_unfinished_requests():
        for output in cast("list[RequestOutput]", llm.llm_engine.step()):
            new = output.outputs[0].token_ids
            outputs[int(output.request_id.split("-")[1])] += new
            steps += bool(new)
    after_first = sum(map(len, outputs)) - len(outputs)
    return outputs, after_first / max(1, steps - len(outputs))
