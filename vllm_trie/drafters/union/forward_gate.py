"""Whether a trained drafter's forward passes pay in a step.

They take time in which the engine would generate tokens. With G tokens in T seconds without them,
passes of c seconds that add g tokens pay where (G + g) / (T + c) > G / T: where g > c * G / T.

All three are measured. The gain depends on what the other parts find: next to a long copied passage
it is small. It is therefore averaged by the number of tokens that the other parts' trees promise.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 32
"""Evaluated drafts over which a gain is averaged; calls over which times are."""
PRIOR_GAIN = 1.0
"""Gain in tokens that is expected of a level without evaluated drafts."""
PRIOR_DRAFTS = 4
"""Drafts that the prior gain counts for."""
FIRST_CALLS = 8
"""Calls before their time is known well enough to forgo one."""
MAX_REST = 16
"""Drafts of a level that are forgone before one is made to measure the gain again."""
MAX_INTERVAL = 10.0
"""Steps longer than this multiple of a usual one waited for requests; they do not count."""
_LEVELS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Limits between levels, in tokens that the other parts promise."""


class _Level:
    """Drafts next to similar candidates of the other parts."""

    def __init__(self) -> None:
        self.gain = PRIOR_GAIN
        self.num_drafts = PRIOR_DRAFTS
        self.num_forgone = 0

    def learn(self, gain: float) -> None:
        self.num_drafts = min(self.num_drafts + 1, MEMORY)
        self.gain += (gain - self.gain) / self.num_drafts


class _Line:
    """A line through (x, y) by least squares; older points fade."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def add(self, x: float, y: float) -> None:
        kept = 1.0 - 1.0 / MEMORY
        new = (1.0, x, y, x * x, x * y)
        self._sums = [kept * old + value for old, value in zip(self._sums, new, strict=True)]

    def fit(self) -> tuple[float, float]:
        """Return offset and slope, neither negative; a line through 0 where x hardly varied."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        slope = y / x if spread < 1e-3 * n * xx else (n * xy - x * y) / spread
        slope = min(max(slope, 0.0), y / x)
        return (y - slope * x) / n, slope


class ForwardGate:
    """Chooses the requests of a step that a trained drafter drafts for."""

    def __init__(self) -> None:
        self._levels = [_Level() for _ in range(len(_LEVELS) + 1)]
        self._call_seconds = _Line()
        self._num_calls = 0
        # Faded sums over steps.
        self._num_steps = self._seconds = self._tokens = 0.0

    def choose(self, promised: Sequence[float]) -> list[int]:
        """Return the requests to draft for: all, some or none.

        Args:
            promised: for each request, the tokens that the other parts' trees promise.
        """
        rows = range(len(promised))
        if self._num_calls < FIRST_CALLS or not self._tokens:
            return list(rows)
        offset, slope = self._call_seconds.fit()
        rate = self._tokens / self._seconds
        levels = [self._level(value) for value in promised]
        paying = [row for row in rows if levels[row].gain > slope * rate]
        total = sum(levels[row].gain - slope * rate for row in paying)
        chosen = set(paying) if total > offset * rate else set()
        for row in rows:
            level = levels[row]
            level.num_forgone = 0 if row in chosen else level.num_forgone + 1
            if level.num_forgone > MAX_REST:
                level.num_forgone = 0
                chosen.add(row)
        return sorted(chosen)

    def observe_call(self, num_requests: int, seconds: float) -> None:
        """Take in a call of the drafter."""
        self._num_calls += 1
        self._call_seconds.add(num_requests, seconds)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in the time between two calls of the union, and the tokens that came with it."""
        if self._tokens and seconds * self._num_steps > MAX_INTERVAL * self._seconds:
            return
        kept = 1.0 - 1.0 / MEMORY
        self._num_steps = kept * self._num_steps + 1.0
        self._seconds = kept * self._seconds + seconds
        self._tokens = kept * self._tokens + num_tokens

    def learn(self, promised: float, gain: float) -> None:
        """Take in an evaluated draft: the tokens that only the trained drafter contributed."""
        self._level(promised).learn(gain)

    def _level(self, promised: float) -> _Level:
        return self._levels[sum(promised >= limit for limit in _LEVELS)]
