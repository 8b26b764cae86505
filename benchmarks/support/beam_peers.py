"""Beam searches of others: vLLM's own, and that of Hugging Face's `generate`."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

from support.engines import Prompts

Hypotheses = list[list[list[int]]]
"""Generated tokens, by prompt and hypothesis, the best first."""


def search_with_vllm(llm: Any, prompts: Prompts, width: int, num_tokens: int) -> Hypotheses:
    """Search with `LLM.beam_search` as it is without the plugin."""
    from vllm.sampling_params import BeamSearchParams

    with patch.dict(os.environ, VLLM_TRIE_BEAM="0"):
        results = llm.beam_search(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            BeamSearchParams(width, num_tokens, ignore_eos=True),
        )
    return [
        [sequence.tokens[len(prompt) :] for sequence in result.sequences]
        for prompt, result in zip(prompts, results, strict=True)
    ]


def search_with_hf(model: Any, prompts: Prompts, width: int, num_tokens: int) -> Hypotheses:
    """Search with `generate` of a model of `transformers`; prompts are equally long."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    inputs = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        tokens = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        )
    return tokens[:, inputs.shape[1] :].view(len(prompts), width, -1).tolist()
