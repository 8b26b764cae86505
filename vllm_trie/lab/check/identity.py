"""Output of each method against plain vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel

from vllm_trie.extras.device_checks.start_check import (
    NUM_LIKELIEST,
    TEMPERATURE,
    TOO_UNLIKELY,
    near_tie,
)
from vllm_trie.lab.check.engines import (
    CHAIN_TOKENS,
    NODES,
    decode,
    prompts,
    start_engine,
)
from vllm_trie.lab.check.parts import Outcome, Settings
from vllm_trie.lab.local_engine import inputs_of, without_memory

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

_REFUSED = "cannot run with this configuration"


class PlainOutput(BaseModel):
    """One prompt's output of plain vLLM."""

    prompt: list[int]
    greedy: list[int]
    margins: list[dict[int, float]]
    """For each greedy token: the likeliest tokens, and how much less likely than the best."""
    seeded: list[int]


class PlainOutputs(BaseModel):
    """The file that :func:`decode_plainly` leaves for :func:`compare_method`."""

    outputs: list[PlainOutput]


def decode_plainly(settings: Settings, dtype: str) -> Outcome:
    """Decode all prompts with plain vLLM, greedily and with seeds."""
    texts = prompts(settings)
    llm = _start(settings, dtype, texts)
    params = _params(settings, len(texts), logprobs=NUM_LIKELIEST)
    greedy = llm.generate(inputs_of(texts), params, use_tqdm=False)
    seeded, _ = decode(llm, texts, _params(settings, len(texts), seeded=True))
    outputs = [
        PlainOutput(
            prompt=text,
            greedy=list(output.outputs[0].token_ids),
            margins=[_margins(logprobs) for logprobs in output.outputs[0].logprobs],
            seeded=sampled,
        )
        for text, output, sampled in zip(texts, greedy, seeded, strict=True)
    ]
    _file(settings, dtype).write_text(PlainOutputs(outputs=outputs).model_dump_json())
    tokens = sum(len(output.greedy) for output in outputs)
    empty = tokens < 2 * len(outputs)
    return Outcome(
        status="failed" if empty else "passed",
        summary=f"{tokens} greedy tokens for {len(outputs)} prompts"
        + (": too few to compare; take a model that answers chats" if empty else ""),
    )


def compare_method(settings: Settings, dtype: str, method: str, verification: str) -> Outcome:
    """Decode all prompts with a method and compare with plain vLLM's output.

    Greedy output must be identical in float32 on a CPU; in other dtypes, and on a GPU, where
    vLLM's own attention multiplies float32 as TF32, the first different token of an output must be
    a near-tie. Seeded output must be plain vLLM's with trees where greedy output must. Rounding and
    rejection sampling give other tokens, which must be likely enough.
    """
    is_exact = dtype == "float32" and not torch.cuda.is_available()
    plain = PlainOutputs.model_validate_json(_file(settings, dtype).read_bytes()).outputs
    texts = [output.prompt for output in plain]
    config: dict[str, Any] = {
        "method": method,
        "verification": verification,
        "num_speculative_tokens": NODES if verification == "tree" else CHAIN_TOKENS,
        "node_budget": "fixed",  # drafts that cost more than they bring are verified too
        **without_memory(method),  # wrong drafts too: the prompts come twice
    }
    if method == "medusa_dynamic":
        if settings.heads is None:
            return Outcome(status="not applicable", summary="no heads: --heads names them")
        config["model"] = settings.heads
    if method == "trie_union":
        config["drafters"] = ["ngram_trie"]
    try:
        llm = _start(settings, dtype, texts, verification, speculative_config=config)
    except ValueError as error:
        if _REFUSED not in str(error):
            raise
        return Outcome(status="not applicable", summary=str(error).partition(_REFUSED)[2][1:])
    greedy, tokens_per_step = decode(llm, texts, _params(settings, len(texts)))
    seeded, _ = decode(llm, texts, _params(settings, len(texts), seeded=True))
    allowed = 0.0 if is_exact else near_tie(getattr(torch, dtype))
    problems, ties = judge(plain, greedy, allowed)
    if verification == "tree" and is_exact:
        wrong = [i for i, output in enumerate(plain) if output.seeded != seeded[i]]
        sampled = "plain vLLM's"
    else:
        wrong = unlikely(llm, texts, seeded)
        sampled = "likely in the model"
    if wrong:
        problems.append(f"seeded output is not {sampled} for prompts {wrong}")
    if tokens_per_step <= 1.0:
        problems.append("no drafted token was accepted, so nothing was verified")
    same = f"greedy output is plain vLLM's for {len(plain) - len(ties)} of {len(plain)} prompts"
    if ties:
        same += f", the others differ at near-ties of at most {max(ties):.2g}"
    passed = f"{same}; seeded output is {sampled}; {tokens_per_step:.2f} tokens a step"
    return Outcome(
        status="failed" if problems else "passed",
        summary="; ".join(problems) or passed,
        measured={"tokens_per_step": tokens_per_step, "near_ties": ties, "prompts": len(plain)},
    )


def judge(
    plain: Sequence[PlainOutput], outputs: Sequence[Sequence[int]], allowed: float
) -> tuple[list[str], list[float]]:
    """Compare greedy outputs.

    Args:
        plain: Plain vLLM's.
        outputs: Of the same prompts.
        allowed: Most by which the first different token may be less likely.

    Returns:
        What is wrong, and the margins of the near-ties that explain the other differences.
    """
    problems, ties = [], []
    for index, (expected, tokens) in enumerate(zip(plain, outputs, strict=True)):
        if list(tokens) == expected.greedy:
            continue
        pairs = enumerate(zip(expected.greedy, tokens, strict=False))
        at = next((i for i, pair in pairs if pair[0] != pair[1]), None)
        if at is None:
            problems.append(f"prompt {index}: {len(tokens)} tokens, not {len(expected.greedy)}")
            continue
        margin = expected.margins[at].get(tokens[at])
        if margin is not None and margin < allowed:
            ties.append(margin)
            continue
        distance = "not among the likeliest" if margin is None else f"{margin:.2g} less likely"
        problems.append(f"prompt {index}: greedy token {at} differs ({distance} in plain vLLM)")
    return problems, ties


def unlikely(
    llm: LLM, texts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[int]:
    """Compute sampled outputs again as prompts; return the indices of those with a token that
    sampling does not give: see :data:`TOO_UNLIKELY`."""
    from vllm import SamplingParams

    inputs = [[*text, *output] for text, output in zip(texts, outputs, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    results = llm.generate(inputs, params, use_tqdm=False)
    indices = []
    for index, (output, result) in enumerate(zip(outputs, results, strict=True)):
        every = map(_margins, (result.prompt_logprobs or [])[len(texts[index]) :])
        # Written so that NaN is too unlikely.
        if not all(
            margins[token] < TOO_UNLIKELY for token, margins in zip(output, every, strict=True)
        ):
            indices.append(index)
    return indices


def _start(
    settings: Settings,
    dtype: str,
    texts: Sequence[Sequence[int]],
    verification: str = "tree",
    **options: object,
) -> Any:
    if torch.cuda.is_available() and verification == "tree":
        # The stock attention of trees: less differs by rounding. Chains run on vLLM's default.
        options["attention_backend"] = "TRITON_ATTN"
    return start_engine(
        settings,
        dtype,
        max(map(len, texts)),
        _max_tokens(settings),
        enable_prefix_caching=False,
        **options,
    )


def _max_tokens(settings: Settings) -> int:
    return 48 if settings.quick else 128


def _params(
    settings: Settings, number: int, seeded: bool = False, **options: Any
) -> list[SamplingParams]:
    from vllm import SamplingParams

    common = {"max_tokens": _max_tokens(settings), "detokenize": False, **options}
    if not seeded:
        return [SamplingParams(temperature=0.0, **common) for _ in range(number)]
    return [
        SamplingParams(temperature=TEMPERATURE, seed=1000 + index, **common)
        for index in range(number)
    ]


def _margins(logprobs: Any) -> dict[int, float]:
    best = max(logprob.logprob for logprob in logprobs.values())
    return {token: best - logprob.logprob for token, logprob in logprobs.items()}


def _file(settings: Settings, dtype: str) -> Path:
    return settings.folder / f"plain-{dtype}.json"
