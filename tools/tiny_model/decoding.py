"""Greedy decoding with the training-side model, and two measures of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tools.tiny_model.data.tokenizer import END_ID
from tools.tiny_model.model import KeyValue, TinyLlama


@torch.no_grad()
def greedy(
    model: TinyLlama, prompts: Sequence[Sequence[int]], max_tokens: int, eos: int | None = END_ID
) -> list[list[int]]:
    """Continue prompts of one common length greedily, in float32.

    Returns:
        The new tokens of each; an output ends before ``eos``.
    """
    ids = torch.tensor(prompts)
    past: list[KeyValue | None] = [None] * len(model.layers)
    done = torch.zeros(len(ids), dtype=torch.bool)
    columns = []
    start = 0
    for _ in range(max_tokens):
        cos, sin = model.rotary(ids.shape[1], start)
        start += ids.shape[1]
        x = F.embedding(ids, model.embed_tokens)
        for at, layer in enumerate(model.layers):
            x, past[at] = layer(x, cos, sin, past[at])
        ids = model.logits(model.norm(x[:, -1:])).argmax(-1)
        columns.append(ids[:, 0])
        if eos is not None:
            done |= ids[:, 0] == eos
            if bool(done.all()):
                break
    outputs = torch.stack(columns, 1).tolist()
    if eos is None:
        return outputs
    return [row[: row.index(eos)] if eos in row else row for row in outputs]


def find_loop(
    tokens: Sequence[int], max_period: int = 64, min_tokens: int = 18
) -> tuple[int, int] | None:
    """First place where a span occurs three times in a row: ``(start of the third, period)``.

    The three must hold at least ``min_tokens`` tokens together, so that ``)))`` is no loop.
    """
    found = [
        (spans[0], period)
        for period in range(1, max_period + 1)
        if (spans := _third_copies(tokens, period, min_tokens))
    ]
    return min(found, default=None)


def looping_positions(
    tokens: Sequence[int], max_period: int = 64, min_tokens: int = 18
) -> list[int]:
    """All positions that lie in the third or a later copy of a span."""
    positions: set[int] = set()
    for period in range(1, max_period + 1):
        positions.update(_third_copies(tokens, period, min_tokens))
    return sorted(positions)


def _third_copies(tokens: Sequence[int], period: int, min_tokens: int) -> list[int]:
    """Positions in third and later copies of spans of ``period`` tokens."""
    positions: list[int] = []
    run = 0  # how many tokens up to here equal the one a period before
    for at in range(period, len(tokens) + 1):
        if at < len(tokens) and tokens[at] == tokens[at - period]:
            run += 1
            continue
        if run >= max(2 * period, min_tokens - period):
            positions += range(at - run + period, at)
        run = 0
    return positions


@dataclass(frozen=True)
class DraftCount:
    """How a drafter did on one output."""

    tokens: int
    steps: int

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)


def ngram_steps(
    prompt: Sequence[int],
    output: Sequence[int],
    longest: int = 4,
    shortest: int = 2,
    draft_tokens: int = 8,
) -> DraftCount:
    """Decoding steps that ``output`` takes with a plain n-gram drafter (prompt lookup).

    Each step drafts the ``draft_tokens`` tokens after the latest earlier occurrence of the
    longest matching suffix; the right ones and one more token are kept.
    """
    tokens, at, steps = list(prompt), 0, 0
    while at < len(output):
        draft: list[int] = []
        for size in range(longest, shortest - 1, -1):
            suffix = tokens[-size:]
            found = next(
                (
                    i
                    for i in range(len(tokens) - size - 1, -1, -1)
                    if tokens[i : i + size] == suffix
                ),
                None,
            )
            if found is not None:
                draft = tokens[found + size : found + size + draft_tokens]
                break
        accepted = 0
        while (
            accepted < len(draft)
            and at + accepted < len(output)
            and draft[accepted] == output[at + accepted]
        ):
            accepted += 1
        kept = output[at : at + accepted + 1]
        tokens += kept
        at += len(kept)
        steps += 1
    return DraftCount(len(output), steps)
