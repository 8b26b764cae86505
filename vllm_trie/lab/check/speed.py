"""A short table of speed: plain vLLM, its n-grams, and `ngram_trie` with its defaults; and what a
step of the latter takes on the host."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from vllm_trie.hooks.wire import TreeStats
from vllm_trie.lab.check.engines import prompts, start_engine
from vllm_trie.lab.check.parts import Outcome, Settings
from vllm_trie.lab.local_engine import NGRAM, generate, interleave, verifier_of, without_memory

if TYPE_CHECKING:
    from vllm import LLM

BATCH_SIZES = (1, 8, 32)
PEER = "ngram_gpu" if torch.cuda.is_available() else "ngram"
METHODS: dict[str, dict[str, object] | None] = {
    "plain": None,
    "ngram_trie": {"method": "ngram_trie", **without_memory("ngram_trie")},
    # The last, as vLLM 0.32 starts no engine on a CPU in a process that has imported numba.
    PEER: {"method": PEER, **NGRAM},
}


def measure(settings: Settings, dtype: str) -> Outcome:
    """Time greedy decoding of the same prompts on all engines, in turns; medians of the ratios."""
    texts = prompts(settings)
    max_tokens, repeats = (16, 2) if settings.quick else (96, 3)
    free, engines = _free_bytes(), {}
    for name, config in METHODS.items():
        engines[name] = start_engine(
            settings,
            dtype,
            max(map(len, texts)),
            max_tokens,
            max_num_seqs=max(BATCH_SIZES),
            speculative_config=config,
        )
        needed = len(METHODS) * (free - _free_bytes())
        if name == "plain" and needed > free:  # the others take as much
            sizes = f"need {needed >> 30} GiB, {free >> 30} GiB are free"
            text = f"{len(METHODS)} engines at once {sizes}"
            return Outcome(status="not applicable", summary=text)
    verifier = verifier_of(engines["ngram_trie"])
    assert verifier is not None
    measured, steps = {}, {}
    for size in BATCH_SIZES:
        queue = [texts[i % len(texts)] for i in range(size)]
        verifier.forget_stats()
        measured[size] = _speeds(engines, queue, max_tokens, repeats)
        if not verifier.totals.steps:
            off = "the engine serves without drafts; its log says why, at the start"
            return Outcome(status="failed", summary=off)
        steps[size] = _step(verifier.totals, size)
    lines = [f"| concurrent requests | plain, tokens/s | `{PEER}` | `ngram_trie` |"]
    lines += ["| ---: | ---: | ---: | ---: |"]
    for size, (plain, ratios) in measured.items():
        lines.append(f"| {size} | {plain:.0f} | {ratios[PEER]:.2f} | {ratios['ngram_trie']:.2f} |")
    text = (
        f"Ratios to plain vLLM, {dtype}, medians of {repeats} turns, {max_tokens} greedy tokens "
        f"of the demo's prompts, which no method knows from before; `{PEER}` with 8 tokens "
        "after n-grams of 1 to 5. A step of `ngram_trie`:"
    )
    names = list(steps[BATCH_SIZES[0]])
    table = [f"| concurrent requests | {' | '.join(names)} |", "| ---: " * (1 + len(names)) + "|"]
    for size, step in steps.items():
        table.append(f"| {size} | {' | '.join(f'{value:.2f}' for value in step.values())} |")
    return Outcome(
        status="passed",
        summary="`ngram_trie` over plain vLLM: "
        + ", ".join(f"{ratios['ngram_trie']:.2f}" for _, ratios in measured.values())
        + f" with {', '.join(map(str, BATCH_SIZES))} requests",
        details=[*lines, "", text, "", *table],
        measured={
            str(size): {"plain_tokens_per_s": plain, **ratios, "step": steps[size]}
            for size, (plain, ratios) in measured.items()
        },
    )


def _step(totals: TreeStats, num_requests: int) -> dict[str, float]:
    """Return the means of a step by name: tokens of each request, waits for the device, and the
    host's milliseconds."""
    steps = totals.steps / num_requests
    seconds = {
        "drafting": totals.drafting_seconds,
        "around the drafter": totals.bookkeeping_seconds,
        "placing": totals.preparation_seconds,
        "verification": totals.verification_seconds,
    }
    return {
        "tokens": totals.tokens / totals.steps,
        "waits": sum(totals.waits.values()) / steps,
        **{f"{name}, ms": 1000 * value / steps for name, value in seconds.items()},
    }


def _speeds(
    engines: dict[str, LLM], queue: Sequence[Sequence[int]], max_tokens: int, repeats: int
) -> tuple[float, dict[str, float]]:
    """Return plain vLLM's tokens per second, and each engine's speed over it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    runs = {name: lambda llm=llm: generate(llm, queue, params) for name, llm in engines.items()}
    interleave(runs, 1)
    seconds = {
        name: [elapsed for elapsed, _ in timed] for name, timed in interleave(runs, repeats).items()
    }
    plain = seconds["plain"]
    ratios = {
        name: median(base / of_engine for base, of_engine in zip(plain, taken, strict=True))
        for name, taken in seconds.items()
    }
    return len(queue) * max_tokens / median(plain), ratios


def _free_bytes() -> int:
    """Return the free memory of the GPU; 0 if there is none."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
