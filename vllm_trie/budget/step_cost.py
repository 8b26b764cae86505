"""Step cost: the duration of a step by its tokens, learned from measured steps."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from vllm_trie.budget.monotone import non_decreasing

# On both sides of a power of two: matrix products work on blocks of rows, and a step with one token
# more than fills its blocks can take a quarter longer.
_KNOTS = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257),
    *(384, 512, 768, 1024, 2048),
)

_RENEWAL = 16  # measurements between updates of a settled table
_OUTLIER = 5.0  # times the expected duration that a measurement counts for at most
_MIN_SECONDS = 1e-9
_MEMORY = 20.0  # measurements that a knot is averaged over


class StepCost:
    """Seconds per step: a curve over the number of tokens.

    The curve has fixed knots and is linear between them. A measurement moves the knots on both
    sides of it (normalized least mean squares, Widrow and Hoff 1960), and the less a knot has seen
    the further. The curve never falls, and beyond the last known knot it continues with the slope
    of its last half.

    What is not measured becomes cheaper with time (:meth:`fade`).
    """

    def __init__(self) -> None:
        # Lists: a step touches two of their entries, where arrays are slower.
        self._seconds = [0.0] * len(_KNOTS)
        self._weights = [0.0] * len(_KNOTS)
        self._measured = [False] * len(_KNOTS)  # not only expected
        self._visited = [False] * len(_KNOTS)  # measured since the last fading
        self._num_known = 0
        self._table: np.ndarray | None = None
        self._num_seen = 0  # measurements
        self._unseen = 0  # those since the table was built

    @property
    def known(self) -> bool:
        """Whether two different sizes were measured or expected."""
        return self._num_known >= 2

    def expect(self, num_tokens: int, seconds: float) -> None:
        """Set a first estimate of a step's duration, which measurements replace."""
        self._add(num_tokens, seconds, is_measured=False)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one measured step; `num_tokens` counts its nodes, too.

        A step that took more than five times the expected time was interrupted by something else,
        and counts as five times.
        """
        self._move_expected(self._add(num_tokens, seconds, is_measured=True))

    def _add(self, num_tokens: int, seconds: float, is_measured: bool) -> float:
        """Move the curve towards a step's duration; return by how many seconds."""
        num_tokens = min(max(num_tokens, 1), _KNOTS[-1])
        right = bisect_left(_KNOTS, num_tokens)
        left = right if _KNOTS[right] == num_tokens else right - 1
        span = _KNOTS[right] - _KNOTS[left]
        share = (_KNOTS[right] - num_tokens) / span if span else 1.0
        for knot in (left, right):
            if not self._weights[knot]:  # it begins on the curve
                self._seconds[knot] = self(_KNOTS[knot]) if self.known else seconds
        expected = share * self._seconds[left] + (1.0 - share) * self._seconds[right]
        seconds = min(seconds, _OUTLIER * expected)
        error = (seconds - expected) / (share * share + (1.0 - share) * (1.0 - share))
        moved = share * self._move(left, share, error, is_measured)
        if left != right:
            moved += (1.0 - share) * self._move(right, 1.0 - share, error, is_measured)
        self._num_seen += 1
        self._unseen += 1
        return moved

    def _move_expected(self, seconds: float) -> None:
        """Let what is only expected follow the measurements.

        A forward pass at start-up lacks the engine's own work and attention, which steps of all
        sizes have. Without this, the sizes measured first would look dearer than the others.
        """
        for knot, weight in enumerate(self._weights):
            if weight and not self._measured[knot]:
                self._seconds[knot] = max(self._seconds[knot] + seconds, _MIN_SECONDS)

    def _move(self, knot: int, weight: float, error: float, is_measured: bool) -> float:
        """Move a knot; return by how many seconds."""
        self._num_known += self._weights[knot] == 0.0
        self._weights[knot] = min(self._weights[knot] + weight, _MEMORY)
        before = self._seconds[knot]
        moved = before + weight / max(self._weights[knot], 1.0) * error
        self._seconds[knot] = max(moved, _MIN_SECONDS)
        self._visited[knot] |= is_measured
        self._measured[knot] |= is_measured
        return self._seconds[knot] - before

    def fade(self, keep: float) -> None:
        """Make sizes cheaper that were not measured since the last call.

        A size that seems too slow is not measured any more, and would stay too slow if the machine
        had been busy with something else. So it becomes cheaper and its measurements count less,
        until it is tried again.

        Args:
            keep: Share that stays of what such a size costs more than the next smaller one that was
                measured, and of its weight.
        """
        base = None
        for knot, weight in enumerate(self._weights):
            if self._visited[knot]:
                base = self._seconds[knot]
            elif weight and base is not None:
                self._seconds[knot] = base + keep * (self._seconds[knot] - base)
                self._weights[knot] = max(keep * weight, min(weight, 1.0))
        self._visited = [False] * len(_KNOTS)
        self._table = None

    def __call__(self, num_tokens: int) -> float:
        """Return the expected seconds of a step; needs :attr:`known`."""
        return float(self.table(num_tokens + 1)[num_tokens])

    def table(self, size: int) -> np.ndarray:
        """Return float64 [size], expected seconds by number of tokens."""
        stale = self._unseen >= (_RENEWAL if self._num_seen > 4 * _RENEWAL else 1)
        if self._table is None or len(self._table) < size or stale:
            self._table = self._build(max(size, 128))
            self._unseen = 0
        return self._table[:size]

    def _build(self, size: int) -> np.ndarray:
        """Return float64 [size], seconds by number of tokens."""
        weights = np.array(self._weights)
        seen = weights > 0
        knots = np.array(_KNOTS, dtype=np.float64)[seen]
        seconds = non_decreasing(np.array(self._seconds)[seen], weights[seen])
        counts = np.arange(size, dtype=np.float64)
        table: np.ndarray = np.interp(counts, knots, seconds)
        beyond = counts > knots[-1]
        if beyond.any() and len(knots) > 1:
            # Of the last half: noise between the last two knots can be a steep slope.
            start = max(int(np.searchsorted(knots, knots[-1] / 2, side="right")) - 1, 0)
            slope = (seconds[-1] - seconds[start]) / (knots[-1] - knots[start])
            table[beyond] = seconds[-1] + slope * (counts[beyond] - knots[-1])
        return table
