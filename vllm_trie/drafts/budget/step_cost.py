"""Step cost: the duration of a step by its tokens, learned from measured steps."""

from __future__ import annotations

from math import exp, log

import numpy as np

_MOST_ERROR = 0.4  # of a logarithm: an interrupted step counts as half as long again
_RATE = 0.4  # of the newest measurement in averages
_MEMORY = 0.995  # of the tilt's evidence, each step
_LEAST_EVIDENCE = 20.0  # squared logarithms of sizes
_RETURN = 0.9995  # of the tilt, each step: a wrong one would keep sizes from being measured again


def moved(average: float, measured: float) -> float:
    """Return an average of durations or ratios after one more measurement."""
    return average * exp(_RATE * _error(measured, average))


def _error(measured: float, expected: float) -> float:
    """Return the logarithm of the quotient, bounded, so that outliers do not steer."""
    return min(max(log(max(measured, 1e-9) / expected), -_MOST_ERROR), _MOST_ERROR)


class StepCost:
    """Seconds per step by its number of tokens n: ``expected(n) * exp(level + tilt * log(n))``.

    The engine's start measures `expected`, which knows where a step fills the blocks of matrix
    products, and where larger blocks make a larger step faster. The level follows each step: a
    machine that is busy with something else makes steps of all sizes longer. The tilt corrects,
    slowly, what larger steps cost beyond what was expected, such as attention. It learns from
    differences between steps that follow one another (recursive least squares), so neither the
    machine's other work nor a size that happens to be measured at a bad time changes the choice
    between sizes.
    """

    def __init__(self) -> None:
        self._expected: dict[int, float] = {}
        # Of what is expected at most up to a number of tokens, of the share of it that is expected
        # there, and of logarithms of numbers of tokens.
        self._table = self._shares = self._logs = np.empty(0)
        self._level = 0.0
        self._tilt = 0.0
        self._mean = 0.0  # logarithm of the tokens of the newest steps
        self._evidence = 0.0

    @property
    def known(self) -> bool:
        """Whether two different sizes were measured or expected."""
        return len(self._expected) >= 2

    def expect(self, num_tokens: int, seconds: float) -> None:
        """Set the duration of a step of an idle machine."""
        self._expected[num_tokens] = max(seconds, 1e-9)
        self._table = np.empty(0)

    def lengthen(self, seconds: float) -> None:
        """Add to the expected duration of steps of all sizes."""
        for num_tokens in self._expected:
            self._expected[num_tokens] += seconds
        self._table = np.empty(0)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one measured step; `num_tokens` counts its nodes, too."""
        if not self.known:
            for size, expected in self._expected.items():
                # Where the larger step was faster, the smaller one was disturbed.
                if (size - num_tokens) * (expected - seconds) < 0:
                    self._expected[size] = seconds = min(seconds, expected)
            self.expect(num_tokens, seconds)
            return
        error = _error(seconds, self(num_tokens))
        if not self._evidence:
            self._mean = log(num_tokens)
        away = log(num_tokens) - self._mean
        self._evidence = max(_MEMORY * self._evidence, _LEAST_EVIDENCE) + away * away
        turn = error * away / self._evidence
        self._level += _RATE * error - turn * self._mean
        self._tilt = _RETURN * self._tilt + turn
        self._mean += _RATE * away

    def __call__(self, num_tokens: int) -> float:
        """Return the expected seconds of a step; needs :attr:`known`."""
        return float(self.table(num_tokens + 1)[num_tokens])

    def table(self, size: int) -> np.ndarray:
        """Return float64 [size], expected seconds by number of tokens."""
        if len(self._table) < size:
            self._build(max(size, 128))
        factors = np.exp(self._level + self._tilt * self._logs[:size])
        seconds: np.ndarray = np.maximum.accumulate(self._table[:size] * factors)
        return seconds * self._shares[:size]

    def _build(self, size: int) -> None:
        """Tabulate what is expected, linear between the sizes."""
        counts = np.arange(size, dtype=np.float64)
        sizes = np.array(sorted(self._expected), dtype=np.float64)
        seconds = np.array([self._expected[int(n)] for n in sizes])
        # Beyond them with the slope of the last half: that of the last two can be noise.
        start = max(int(np.searchsorted(sizes, sizes[-1] / 2, side="right")) - 1, 0)
        slope = max(seconds[-1] - seconds[start], 0.0) / (sizes[-1] - sizes[start])
        beyond = slope * np.maximum(counts - sizes[-1], 0.0)
        expected = np.interp(counts, sizes, seconds) + beyond
        self._table = np.maximum.accumulate(expected)
        self._shares = expected / self._table
        self._logs = np.log(np.maximum(counts, 1.0))
