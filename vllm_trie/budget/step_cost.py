"""What a step costs as a function of the tokens in it, learned from measured steps."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from vllm_trie.budget.monotone import non_decreasing

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)

_RENEWAL = 16  # measurements after which a settled curve is drawn anew


class StepCost:
    """Seconds per step over the number of tokens in the step.

    A curve with fixed knots. A measurement moves the knots on both sides of it, and the older a
    knot's knowledge the further it moves. Between known knots the curve is linear, beyond the last
    known one it goes on with the steepest slope seen, and it never falls.
    """

    def __init__(self, memory: float = 20.0) -> None:
        """
        Args:
            memory: measurements that a knot's value is averaged over.
        """
        self._memory = memory
        # Lists: a step touches two of their entries, which arrays are slower at.
        self._seconds = [0.0] * len(_KNOTS)
        self._weights = [0.0] * len(_KNOTS)
        self._num_known = 0
        self._table: np.ndarray | None = None
        self._unseen = 0  # measurements since the table was built

    @property
    def known(self) -> bool:
        """Whether anything was measured at two different sizes."""
        return self._num_known >= 2

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one measured step; one that took five times the expected time counts as five.

        Such a step was interrupted by something else, and one bad number must not steer a hundred
        steps.
        """
        num_tokens = min(max(num_tokens, 1), _KNOTS[-1])
        right = bisect_left(_KNOTS, num_tokens)
        left = right if _KNOTS[right] == num_tokens else right - 1
        span = _KNOTS[right] - _KNOTS[left]
        share = (_KNOTS[right] - num_tokens) / span if span else 1.0
        if self._weights[left] and self._weights[right]:
            expected = share * self._seconds[left] + (1.0 - share) * self._seconds[right]
            seconds = min(seconds, 5.0 * expected)
        elif self.known:  # a size that is seen for the first time
            seconds = min(seconds, 5.0 * self(num_tokens))
        self._move(left, share, seconds)
        if left != right:
            self._move(right, 1.0 - share, seconds)
        self._unseen += 1

    def _move(self, knot: int, weight: float, seconds: float) -> None:
        self._num_known += self._weights[knot] == 0.0
        self._weights[knot] = min(self._weights[knot] + weight, self._memory)
        self._seconds[knot] += weight / self._weights[knot] * (seconds - self._seconds[knot])

    def __call__(self, num_tokens: int) -> float:
        """Expected seconds of a step with so many tokens; needs :attr:`known`."""
        return float(self.table(num_tokens + 1)[num_tokens])

    def table(self, size: int) -> np.ndarray:
        """float64 [size], expected seconds for 0 to size - 1 tokens."""
        stale = self._unseen >= (_RENEWAL if self._settled else 1)
        if self._table is None or len(self._table) < size or stale:
            self._table = self._build(max(size, 128))
            self._unseen = 0
        return self._table[:size]

    @property
    def _settled(self) -> bool:
        """Whether one more measurement makes little difference."""
        return sum(self._weights) > 4 * _RENEWAL

    def _build(self, size: int) -> np.ndarray:
        weights = np.array(self._weights)
        seen = weights > 0
        knots = np.array(_KNOTS, dtype=np.float64)[seen]
        seconds = non_decreasing(np.array(self._seconds)[seen], weights[seen])
        counts = np.arange(size, dtype=np.float64)
        table = np.interp(counts, knots, seconds)
        beyond = counts > knots[-1]
        if beyond.any() and len(knots) > 1:
            slope = max(np.max(np.diff(seconds) / np.diff(knots)), 0.0)
            table[beyond] = seconds[-1] + slope * (counts[beyond] - knots[-1])
        return table
