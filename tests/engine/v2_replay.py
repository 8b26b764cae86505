"""Drafts for a model with an 8B's heads in bfloat16, whose greedy output is recorded text.

Its tokens follow from the request, the position and the token of each row, so that rounding changes
none: chains and trees must give exactly the text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM

from benchmarks.support import replay_model
from tests.engine.compare import generate, preemptions
from tests.engine.conftest import runner_of, trees_of
from tests.engine.drafters import OracleDrafter

SHAPE = {
    "hidden_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
}
"""Attention of Llama 3 8B, in one layer. Larger feed-forward layers and vocabularies are vLLM's."""
VOCABULARY = 4096


_kept: list[LLM] = []
"""An engine that is freed ends the process groups of the others."""


def tell_owners(llm: LLM, prompts: list[list[int]]) -> None:
    """Let the model know the text of each row of a step."""
    runner = runner_of(llm)
    stock = runner.prepare_inputs
    owners = torch.zeros(0, dtype=torch.int64)

    def prepare_inputs(*arguments: Any) -> Any:
        nonlocal owners
        batch = stock(*arguments)
        texts = [runner.adapter._requests[name] for name in batch.req_ids]
        numbers = [prompts.index(t.view[: t.num_prompt_tokens].tolist()) for t in texts]
        owners = torch.from_numpy(np.repeat(numbers, batch.num_scheduled_tokens))
        return batch

    runner.prepare_inputs = prepare_inputs
    runner.model.owners = lambda num_rows: torch.nn.functional.pad(
        owners, (0, num_rows - len(owners))
    )


def replay(
    engine: Callable[..., LLM],
    methods: dict[str, tuple[dict[str, Any], type]],
    texts: list[list[int]],
    params: Any,
    folder: Path,
) -> dict[str, Any]:
    """Return the texts that engines leave, and their steps and tokens, by method.

    Args:
        engine: Makes one.
        methods: Speculative configurations, and drafters that take the place of theirs.
        texts: Prompts and answers, which have the length that `params` asks for.
        params: Of sampling.
        folder: An empty one.
    """
    replay_model.register()
    replay_model.SHAPES["8b"] = SHAPE
    model = replay_model.write_config(folder, "8b", VOCABULARY, max_positions=160)
    replay_model.Recorded.play(texts)
    prompts = [text[: -params.max_tokens] for text in texts]
    answers = [text[-params.max_tokens :] for text in texts]
    OracleDrafter.answers = dict(zip(map(tuple, prompts), answers, strict=True))
    result = {}
    for name, (method, drafter) in methods.items():
        llm = engine(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            reasoning_config=None,  # which needs a tokenizer
            dtype="bfloat16",
            speculative_config=method,
        )
        _kept.append(llm)
        tell_owners(llm, prompts)
        guard = trees_of(llm).guard
        guard.drafter = drafter(guard.drafter.options, guard.drafter.context)
        with preemptions(llm) as preempted:
            outputs = generate(llm, [{"prompt_token_ids": prompt} for prompt in prompts], params)
        totals = trees_of(llm).totals
        result[name] = {
            "is_text": [
                [*o.outputs[0].token_ids] == a for o, a in zip(outputs, answers, strict=True)
            ],
            "steps": [totals.steps, totals.tokens],
            "preempted": len(preempted),
        }
    return result
