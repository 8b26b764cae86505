"""Whether a trained drafter's forward passes pay in a step.

They take time in which the engine would generate tokens. The engine's rate, tokens over all its
time, is highest where the passes are made that add more tokens than the rate would in the same
time: those of c seconds that add g tokens where g > c * rate.

All of it is measured. The gain depends on what the other parts find: next to a long copied passage
it is small. It is therefore averaged by the number of tokens that the other parts' trees promise.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 32
"""Evaluated drafts over which a gain is averaged; calls over which times are."""
FIRST_DRAFTS = 16
"""Drafts of a level that are made to measure its gain before any is forgone."""
MAX_REST = 32
"""Steps in which a level's drafts are forgone before some are made to measure the gain again."""
FIRST_CALLS = 8
"""Calls that are made to measure gains, whatever they cost."""
EXPLORATION = 0.08
"""Share of the time for further calls that are made only to measure gains."""
MAX_INTERVAL = 10.0
"""Steps longer than this multiple of a usual one waited for requests; they do not count."""
_LEVELS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Limits between levels, in tokens that the other parts promise."""


class _Level:
    """Drafts next to similar candidates of the other parts."""

    def __init__(self) -> None:
        self.gain = 0.0
        self.num_evaluated = 0
        self.num_made = 0
        self.num_forgone = 0

    @property
    def is_due(self) -> bool:
        """Whether its gain is to be measured."""
        return self.num_made < FIRST_DRAFTS or self.num_forgone >= MAX_REST

    def learn(self, gain: float) -> None:
        self.num_evaluated = min(self.num_evaluated + 1, MEMORY)
        self.gain += (gain - self.gain) / self.num_evaluated


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
        if not n:
            return 0.0, 0.0
        spread = n * xx - x * x
        slope = y / x if spread < 1e-3 * n * xx else (n * xy - x * y) / spread
        slope = min(max(slope, 0.0), y / x)
        return (y - slope * x) / n, slope


class ForwardGate:
    """Chooses the requests of a step that a trained drafter drafts for."""

    def __init__(self) -> None:
        self._levels = [_Level() for _ in range(len(_LEVELS) + 1)]
        self._call_seconds = _Line()
        # Calls that were made only to measure gains, and the time left for more.
        self._num_explored = 0
        self._exploration_seconds = 0.0
        self._explores = False  # whether the call of this step is one
        # Faded sums over steps.
        self._num_steps = self._seconds = self._tokens = 0.0

    def choose(self, promised: Sequence[float]) -> list[int]:
        """Return the requests to draft for: all, some or none.

        Args:
            promised: For each request, the tokens that the other parts' trees promise.
        """
        rows = range(len(promised))
        offset, slope = self._call_seconds.fit()
        rate = self._tokens / self._seconds if self._seconds else 0.0
        levels = [self._level(value) for value in promised]
        surplus = {level: level.gain - slope * rate for level in levels}
        total = sum(max(0.0, surplus[level]) for level in levels)
        pays = total > offset * rate
        self._explores = not pays and any(level.is_due for level in surplus)
        may_explore = self._num_explored < FIRST_CALLS or self._exploration_seconds > 0.0
        chosen: list[int] = []
        if pays or (self._explores and may_explore):
            # One call serves all that are worth their share of it.
            chosen = [row for row in rows if levels[row].is_due or surplus[levels[row]] > 0.0]
        for level in surplus:
            level.num_forgone += 1
        for row in chosen:
            levels[row].num_forgone = 0
            levels[row].num_made += 1
        return chosen

    def observe_call(self, num_requests: int, seconds: float) -> None:
        """Take in a call of the drafter, with what is drafted after its chains."""
        self._call_seconds.add(num_requests, seconds)
        if self._explores:
            self._num_explored += 1
            self._exploration_seconds -= seconds

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in a step with the drafting after it, passes included, and the step's tokens."""
        if self._tokens and seconds * self._num_steps > MAX_INTERVAL * self._seconds:
            return
        self._exploration_seconds += EXPLORATION * seconds
        kept = 1.0 - 1.0 / MEMORY
        self._num_steps = kept * self._num_steps + 1.0
        self._seconds = kept * self._seconds + seconds
        self._tokens = kept * self._tokens + num_tokens

    def learn(self, promised: float, gain: float) -> None:
        """Take in an evaluated draft: the tokens that only the trained drafter contributed."""
        self._level(promised).learn(gain)

    def _level(self, promised: float) -> _Level:
        return self._levels[sum(promised >= limit for limit in _LEVELS)]
