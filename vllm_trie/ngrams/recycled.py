"""The table of recycled successors in readable Python: the twin of core/recycled.hpp.

Verification computes the model's argmax after every node of a tree. Those after rejected nodes are
not part of the output, but tell what the model would say there: they are kept by the last two
tokens, and by the last one, for later trees.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models
with Token Recycling" (2024), section 3; there the table is keyed by one token.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import numpy as np

ANY_TOKEN = -1
"""In place of the first token: a context of one token."""
NUM_SUCCESSORS, NUM_WAYS, MAX_COUNT = 4, 4, 6


class Recycled(Protocol):
    """Successors by scope and context."""

    def observe(self, scope: int, rows: np.ndarray) -> None:
        """Count successors: int32 [rows, 3], two tokens and the one after them."""
        ...


class _Context:
    def __init__(self, scope: int, before: int, last: int) -> None:
        self.key = scope, before, last
        self.counted: list[tuple[int, int]] = []  # (successor, count), most frequent first

    def add(self, successor: int) -> bool:
        """Count a successor; return whether it is new."""
        count = 1 + dict(self.counted).get(successor, 0)
        others = [counted for counted in self.counted if counted[0] != successor]
        is_new = count == 1
        if is_new and len(others) == NUM_SUCCESSORS:
            others.pop()
        if count > MAX_COUNT:
            others = [(token, times // 2) for token, times in others if times > 1]
            count //= 2
        place = next((i for i, (_, times) in enumerate(others) if times <= count), len(others))
        self.counted = [*others[:place], (successor, count), *others[place:]]
        return is_new


class RecycledTable:
    """A table of fixed size, in buckets; in a full bucket the context seen longest ago goes."""

    def __init__(self, size_log2: int) -> None:
        self._bucket_mask = (1 << size_log2) // NUM_WAYS - 1
        self._buckets: dict[int, list[_Context]] = defaultdict(list)  # the latest first

    def contexts(self, scope: int, before: int, last: int) -> list[list[tuple[int, int]]]:
        """Return (successor, count) after two tokens, and after the last of them alone; the most
        frequent first."""
        return [self._find(scope, before, last), self._find(scope, ANY_TOKEN, last)]

    def _find(self, scope: int, before: int, last: int) -> list[tuple[int, int]]:
        for context in self._buckets.get(self._bucket(scope, before, last), ()):
            if context.key == (scope, before, last):
                return context.counted
        return []

    def observe(self, scope: int, rows: np.ndarray) -> None:
        """Count successors: int32 [rows, 3], two tokens and the one after them."""
        for before, last, successor in rows.tolist():
            # As in Kneser-Ney smoothing, the shorter context counts the different longer ones.
            if self._count(scope, before, last, successor):
                self._count(scope, ANY_TOKEN, last, successor)

    def _count(self, scope: int, before: int, last: int, successor: int) -> bool:
        bucket = self._buckets[self._bucket(scope, before, last)]
        context = next(
            (candidate for candidate in bucket if candidate.key == (scope, before, last)), None
        )
        if context is None:
            context = _Context(scope, before, last)
        else:
            bucket.remove(context)
        bucket.insert(0, context)
        del bucket[NUM_WAYS:]
        return context.add(successor)

    def _bucket(self, scope: int, before: int, last: int) -> int:
        return _hash_edge(_hash_edge(before, last), scope) & self._bucket_mask


def _hash_edge(parent: int, token: int) -> int:
    """Return what hash_edge in core/index.hpp does."""
    mask = (1 << 64) - 1
    key = ((parent & 0xFFFFFFFF) << 32) | (token & 0xFFFFFFFF)
    key = (key * 0x9E3779B97F4A7C15) & mask
    key ^= key >> 29
    return ((key * 0xBF58476D1CE4E5B9) & mask) >> 32
