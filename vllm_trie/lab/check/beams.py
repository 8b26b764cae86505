"""Native beam search against the same tokens computed as prompts: `vllm-trie beam check`.

A search computes a hypothesis token by token, in rows that share, copy and hand over KV blocks. The
check computes the same tokens again, in one go as a prompt, which needs none of that. Where the
log-probabilities differ by more than those of ordinary requests, some KV was wrong. A hypothesis'
score has to be the mean of the log-probabilities that the prompt gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt

from vllm_trie.lab.check.engines import ALLOWED, start_engine
from vllm_trie.lab.check.parts import Outcome, Settings
from vllm_trie.vllm_hooks.scheduler.search_check import allowed_difference
from vllm_trie.vllm_hooks.setup.beam_support import reason_off

_LONGEST_PROMPT = 200


class BeamCheck(NamedTuple):
    """Result of :func:`check`; differences are means per token, the worst of all hypotheses."""

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
        return allowed_difference(self.ordinary)

    @property
    def passed(self) -> bool:
        return bool(self.found <= self.allowed) and not self.out_of_order


def check(llm: LLM, widths: Sequence[int] = (2, 4, 8), max_tokens: int = 40) -> BeamCheck:
    """Run random searches next to greedy requests; compute every hypothesis again as a prompt.

    Args:
        llm: A vLLM engine with native beam search on.
        widths: Widths of the searches; three searches of each.
        max_tokens: Length of the hypotheses; should span several KV blocks.

    Raises:
        RuntimeError: If a search failed; the engine's log has its traceback.
    """
    rng = np.random.default_rng(0)
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def prompt() -> TokensPrompt:
        tokens = rng.integers(vocab_size, size=rng.integers(5, _LONGEST_PROMPT))
        return TokensPrompt(prompt_token_ids=tokens.tolist())

    prompts = [prompt() for _ in range(6 * len(widths))]

    def params(width: int | None) -> SamplingParams:
        return SamplingParams(
            n=width or 1,
            extra_args=None if width is None else {"beam_width": width},
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0,
        )

    every = [
        params(None) if i % 2 else params(widths[i // 2 % len(widths)]) for i in range(len(prompts))
    ]
    results = llm.generate(prompts, every, use_tqdm=False)
    searched = results[::2]
    failed = sum(result.outputs[0].finish_reason == "error" for result in searched)
    if failed:
        raise RuntimeError(f"{failed} of {len(searched)} beam searches failed: see the log")
    scores = [[output.score for output in result.outputs] for result in searched]  # type: ignore
    return BeamCheck(
        num_hypotheses=sum(map(len, scores)),
        num_pairs=sum(map(_num_shared_prefixes, searched)),
        # NumPy's maximum of numbers and NaN is NaN, which passes no comparison.
        ordinary=float(np.max(_differences(llm, results[1::2]))),
        found=float(np.max(_differences(llm, searched))),
        out_of_order=sum(
            later > earlier for ranked in scores for earlier, later in pairwise(ranked)
        ),
    )


def check_beams(settings: Settings, dtype: str) -> Outcome:
    """Search, and rescore every hypothesis by a plain forward pass."""
    widths, max_tokens = ((2, 4), 24) if settings.quick else ((2, 4, 8), 40)
    llm = start_engine(
        settings,
        dtype,
        _LONGEST_PROMPT,
        max_tokens,
        max_num_seqs=32,
        additional_config={"vllm_trie": ALLOWED},
    )
    if reason := reason_off(llm.llm_engine.vllm_config):
        return Outcome(status="not applicable", summary=f"native beam search is off: {reason}")
    result = check(llm, widths, max_tokens)
    return Outcome(
        status="passed" if result.passed else "failed",
        summary=f"{result.num_hypotheses} hypotheses, {result.num_pairs} pairs with a common "
        f"beginning: scores and log-probabilities differ by {result.found:.2g} a token from the "
        f"same tokens as a prompt, allowed is {result.allowed:.2g} (ordinary requests: "
        f"{result.ordinary:.2g}); {result.out_of_order} out of order",
        measured={**result._asdict(), "allowed": result.allowed},
    )


def _differences(llm: LLM, results: Sequence[RequestOutput]) -> list[float]:
    """Return the mean absolute difference per token of each output to its tokens as a prompt, or
    that of a hypothesis' score if it is larger."""
    pairs = [(list(r.prompt_token_ids or ()), output) for r in results for output in r.outputs]
    again = llm.generate(
        [TokensPrompt(prompt_token_ids=[*prompt, *output.token_ids]) for prompt, output in pairs],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    worst = []
    for (prompt, output), computed in zip(pairs, again, strict=True):
        of_prompt: Any = computed.prompt_logprobs
        got: Any = output.logprobs
        both = zip(output.token_ids, got, of_prompt[len(prompt) :], strict=True)
        logprobs = np.array([(ours[t].logprob, theirs[t].logprob) for t, ours, theirs in both])
        differences = [np.abs(logprobs[:, 0] - logprobs[:, 1]).mean()]
        if (score := getattr(output, "score", None)) is not None:  # the length penalty is 1
            differences.append(abs(score - logprobs[:, 1].mean()))
        worst.append(float(np.max(differences)))
    return worst


def _num_shared_prefixes(result: RequestOutput) -> int:
    first = [output.token_ids[0] for output in result.outputs]
    return sum(a == b for i, a in enumerate(first) for b in first[:i])
