"""Step cost: the duration of a step by its requests and tokens, learned from measured steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from vllm_trie.budget.monotone import non_decreasing
from vllm_trie.checked_numbers import checked

# On both sides of a power of two: matrix products work on blocks of rows, and a step with one token
# more than fills its blocks can take a quarter longer.
_KNOTS = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257),
    *(384, 512, 768, 1024, 2048),
)

_RENEWAL = 16  # measurements between updates of a settled table
_ROW_MEMORY = 500.0  # measurements that the cost of a request is learned from
_ROW_PRIOR = 20.0  # weight of the prior that a request costs nothing, in squared requests
_OUTLIER = 5.0  # times the expected duration that a measurement counts for at most
_MIN_SECONDS = 1e-9
_MAX_SECONDS = 600.0  # in a file
_MAX_SLOPE = 1e12  # likewise


class StepCost:
    """Seconds per step: a curve over the number of tokens, and a cost for each request.

    Ten requests with a token each cost more than one request with nine nodes: each has its own
    context to attend to and its own bookkeeping.

    The curve has fixed knots and is linear between them. A measurement moves the knots on both
    sides of it (normalized least mean squares, Widrow and Hoff 1960), and the less a knot has seen
    the further. The curve never falls, and beyond the last known knot it continues with the slope
    of its last half. The cost of a request is the slope between a step's requests in excess of the
    usual number for its tokens and its excess duration.

    What is not measured becomes cheaper with time (:meth:`fade`).

    Args:
        memory: measurements that a knot's value is averaged over.
    """

    def __init__(self, memory: float = 20.0) -> None:
        self._memory = memory
        # Lists: a step touches two of their entries, where arrays are slower.
        self._seconds = [0.0] * len(_KNOTS)
        self._rows = [0.0] * len(_KNOTS)  # 0: expected, not measured yet
        self._weights = [0.0] * len(_KNOTS)
        self._visited = [False] * len(_KNOTS)  # measured since the last fading
        self._num_known = 0
        self._covariance = 0.0  # of rows and seconds at equal numbers of tokens; a decaying sum
        self._variance = 0.0  # of rows, likewise
        self._table: np.ndarray | None = None
        self._num_seen = 0  # measurements
        self._unseen = 0  # those since the table was built

    @property
    def known(self) -> bool:
        """Whether two different sizes were measured or expected."""
        return self._num_known >= 2

    @property
    def seconds_per_row(self) -> float:
        """Cost of a request in addition to its tokens."""
        return max(self._covariance, 0.0) / (self._variance + _ROW_PRIOR)

    def expect(self, num_tokens: int, seconds: float) -> None:
        """Set a first estimate of a step's duration, which measurements replace."""
        self.observe(0, num_tokens, seconds)

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take in one measured step.

        A step that took more than five times the expected time was interrupted by something else,
        and counts as five times.

        Args:
            num_rows: requests in the step; 0 for an estimate.
            num_tokens: their tokens and nodes together.
            seconds: duration.
        """
        num_tokens = min(max(num_tokens, 1), _KNOTS[-1])
        right = bisect_left(_KNOTS, num_tokens)
        left = right if _KNOTS[right] == num_tokens else right - 1
        span = _KNOTS[right] - _KNOTS[left]
        share = (_KNOTS[right] - num_tokens) / span if span else 1.0
        for knot in (left, right):
            if not self._weights[knot]:  # it begins on the curve
                begin = self(max(num_rows, 1), _KNOTS[knot]) if self.known else seconds
                self._seconds[knot] = begin
        expected = share * self._seconds[left] + (1.0 - share) * self._seconds[right]
        seconds = min(seconds, _OUTLIER * expected)
        if num_rows and self._rows[left] and self._rows[right]:
            usual = share * self._rows[left] + (1.0 - share) * self._rows[right]
            excess = num_rows - usual
            keep = 1.0 - 1.0 / _ROW_MEMORY
            self._covariance = keep * self._covariance + excess * (seconds - expected)
            self._variance = keep * self._variance + excess * excess
        error = (seconds - expected) / (share * share + (1.0 - share) * (1.0 - share))
        moved = share * self._move(left, share, num_rows, error)
        if left != right:
            moved += (1.0 - share) * self._move(right, 1.0 - share, num_rows, error)
        if num_rows:
            self._move_expected(moved)
        self._num_seen += 1
        self._unseen += 1

    def _move_expected(self, seconds: float) -> None:
        """Let what is only expected follow the measurements.

        A forward pass at start-up lacks the engine's own work and attention, which steps of all
        sizes have. Without this, the sizes measured first would look dearer than the others.
        """
        for knot, weight in enumerate(self._weights):
            if weight and not self._rows[knot]:
                self._seconds[knot] = max(self._seconds[knot] + seconds, _MIN_SECONDS)

    def _move(self, knot: int, weight: float, num_rows: int, error: float) -> float:
        """Move a knot; return by how many seconds."""
        self._num_known += self._weights[knot] == 0.0
        self._weights[knot] = min(self._weights[knot] + weight, self._memory)
        before = self._seconds[knot]
        moved = before + weight / max(self._weights[knot], 1.0) * error
        self._seconds[knot] = max(moved, _MIN_SECONDS)
        if num_rows:
            self._visited[knot] = True
            step = weight / self._weights[knot] if self._rows[knot] else 1.0
            self._rows[knot] += step * (num_rows - self._rows[knot])
        return self._seconds[knot] - before

    def fade(self, keep: float) -> None:
        """Make sizes cheaper that were not measured since the last call.

        A size that seems too slow is not measured any more, and would stay too slow if the machine
        had been busy with something else. So it becomes cheaper and its measurements count less,
        until it is tried again.

        Args:
            keep: share that stays of what such a size costs more than the next smaller one that was
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

    def state(self) -> dict[str, list[float]]:
        """Return what was learned, for :meth:`restore`."""
        return {
            "seconds": self._seconds.copy(),
            "rows": self._rows.copy(),
            "weights": self._weights.copy(),
            "row_slope": [self._covariance, self._variance],
        }

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from the state of another object.

        Raises:
            ValueError: it is not such a state; nothing is changed then.
        """
        seconds = checked(state, "seconds", len(_KNOTS), 0.0, _MAX_SECONDS)
        rows = checked(state, "rows", len(_KNOTS), 0.0, _KNOTS[-1])
        weights = checked(state, "weights", len(_KNOTS), 0.0, self._memory)
        slope = checked(state, "row_slope", 2, -_MAX_SLOPE, _MAX_SLOPE)
        if slope[1] < 0.0 or (seconds[weights > 0.0] <= 0.0).any():
            raise ValueError("a variance or a duration that is not positive")
        self._seconds, self._rows = seconds.tolist(), rows.tolist()
        self._weights = weights.tolist()
        self._covariance, self._variance = slope.tolist()
        self._num_known = int((weights > 0.0).sum())
        self._table = None

    def __call__(self, num_rows: int, num_tokens: int) -> float:
        """Return the expected seconds of a step; needs :attr:`known`."""
        return float(self.table(num_rows, num_tokens + 1)[num_tokens])

    def table(self, num_rows: int, size: int) -> np.ndarray:
        """Return float64 [size], expected seconds of `num_rows` requests by number of tokens."""
        stale = self._unseen >= (_RENEWAL if self._num_seen > 4 * _RENEWAL else 1)
        if self._table is None or len(self._table) < size or stale:
            self._table = self._build(max(size, 128))
            self._unseen = 0
        seconds: np.ndarray = self._table[:size] + self.seconds_per_row * num_rows
        bounded: np.ndarray = np.maximum(seconds, _MIN_SECONDS)
        return bounded

    def _build(self, size: int) -> np.ndarray:
        """Return float64 [size], seconds by number of tokens without the cost of requests."""
        weights = np.array(self._weights)
        seen = weights > 0
        knots = np.array(_KNOTS, dtype=np.float64)[seen]
        of_tokens = np.array(self._seconds) - self.seconds_per_row * np.maximum(self._rows, 1.0)
        seconds = non_decreasing(of_tokens[seen], weights[seen])
        counts = np.arange(size, dtype=np.float64)
        table: np.ndarray = np.interp(counts, knots, seconds)
        beyond = counts > knots[-1]
        if beyond.any() and len(knots) > 1:
            # Of the last half: noise between the last two knots can be a steep slope.
            start = max(int(np.searchsorted(knots, knots[-1] / 2, side="right")) - 1, 0)
            slope = (seconds[-1] - seconds[start]) / (knots[-1] - knots[start])
            table[beyond] = seconds[-1] + slope * (counts[beyond] - knots[-1])
        return table
