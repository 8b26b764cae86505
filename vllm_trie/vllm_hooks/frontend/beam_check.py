"""Does native beam search give right results on this machine? See ``vllm-trie beam check``.

A search computes a hypothesis token by token, in rows that share, copy and hand over KV blocks. The
log-probabilities of the same tokens, computed in one go as a prompt, know nothing of that. Where
the two differ by more than they do for ordinary requests, some KV was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm import SamplingParams

TOLERATED = 4.0
"""Largest difference allowed, in differences that ordinary requests show themselves."""
SMALLEST = 2e-3
"""A difference per token that is never called wrong: float32 kernels differ by less."""


class BeamCheck(NamedTuple):
    """What :func:`check` found; differences are means per token, the worst of all hypotheses."""

    num_hypotheses: int
    num_pairs: int
    """Pairs of hypotheses that share generated tokens."""
    ordinary: float
    """Difference that greedy requests of the same engine show."""
    found: float
    out_of_order: int
    """Hypotheses with a better score than the one before them."""

    @property
    def allowed(self) -> float:
        return max(SMALLEST, TOLERATED * self.ordinary)

    @property
    def passed(self) -> bool:
        return bool(self.found <= self.allowed) and not self.out_of_order


def check(
    llm: Any, widths: Sequence[int] = (2, 4, 8), max_tokens: int = 40, seed: int = 0
) -> BeamCheck:
    """Run random searches beside greedy requests and compute every hypothesis again as a prompt.

    Args:
        llm: a vLLM engine with native beam search on.
        widths: of the searches; three searches of each.
        max_tokens: length of the hypotheses; several KV blocks show more than one.
        seed: of the prompts, random tokens.
    """
    rng = np.random.default_rng(seed)
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = [
        rng.integers(vocab_size, size=rng.integers(5, 200)).tolist() for _ in range(6 * len(widths))
    ]
    greedy = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
    params = [
        SamplingParams(**greedy)
        if i % 2
        else SamplingParams(
            n=widths[i // 2 % len(widths)],
            extra_args={"beam_width": widths[i // 2 % len(widths)]},
            **greedy,
        )
        for i in range(len(prompts))
    ]
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    searched = [result for i, result in enumerate(results) if not i % 2]
    return BeamCheck(
        sum(len(result.outputs) for result in searched),
        sum(_shared_prefixes(result) for result in searched),
        max(_differences(llm, results[1::2])),
        max(_differences(llm, searched)),
        sum(
            later.score > earlier.score
            for result in searched
            for earlier, later in zip(result.outputs, result.outputs[1:], strict=False)
        ),
    )


def _differences(llm: Any, results: Sequence[Any]) -> list[float]:
    """Mean absolute difference per token of each output to the same tokens as a prompt."""
    pairs = [(result, output) for result in results for output in result.outputs]
    again = llm.generate(
        [{"prompt_token_ids": [*result.prompt_token_ids, *o.token_ids]} for result, o in pairs],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    found = []
    for (result, output), computed in zip(pairs, again, strict=True):
        start = len(result.prompt_token_ids)
        wanted = [
            entries[token].logprob
            for token, entries in zip(
                output.token_ids, computed.prompt_logprobs[start:], strict=True
            )
        ]
        got = [
            entries[token].logprob
            for token, entries in zip(output.token_ids, output.logprobs, strict=True)
        ]
        found.append(float(np.abs(np.subtract(got, wanted)).mean()))
    return found


def _shared_prefixes(result: Any) -> int:
    tokens = [tuple(output.token_ids) for output in result.outputs]
    return sum(a[0] == b[0] for i, a in enumerate(tokens) for b in tokens[:i])
