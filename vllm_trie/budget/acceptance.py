"""How often nodes are accepted, against what their drafter promised."""

from __future__ import annotations

import numpy as np

from vllm_trie.budget.monotone import non_decreasing

_EDGES = np.array(
    [0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96]
)
_CENTRES = np.array(
    [0.0015, 0.0045, 0.009, 0.018, 0.037, 0.075, 0.125, 0.175, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75,
     0.85, 0.93, 0.98]
)  # fmt: skip
_PROMISES = np.concatenate([[0.0], _CENTRES, [1.0]])


class AcceptanceCalibration:
    """Maps promised probabilities to observed ones, monotonically, learned online.

    Nodes are sorted into bins by promised probability; each bin keeps a decaying count of what was
    verified and accepted and starts from the promise itself.
    """

    def __init__(self, prior_weight: float = 30.0, memory: float = 1000.0) -> None:
        """
        Args:
            prior_weight: verified nodes that the promise counts for in each bin.
            memory: verified nodes that a bin remembers.
        """
        self._prior = prior_weight
        self._memory = memory
        self._verified = np.zeros(len(_CENTRES))
        self._accepted = np.zeros(len(_CENTRES))
        self._expected: np.ndarray | None = None

    def observe(self, promised: np.ndarray, accepted: np.ndarray) -> None:
        """Take in verified nodes.

        Args:
            promised: float [n], the drafter's probabilities.
            accepted: int [k], indices of the accepted ones.
        """
        bins = np.searchsorted(_EDGES, promised)
        self._verified += np.bincount(bins, minlength=len(_CENTRES))
        if len(accepted):
            self._accepted += np.bincount(bins[accepted], minlength=len(_CENTRES))
        full = self._verified > self._memory
        if full.any():
            self._accepted[full] *= self._memory / self._verified[full]
            self._verified[full] = self._memory
        self._expected = None

    def fade(self, factor: float) -> None:
        """Let what was seen so far count less, by this factor."""
        self._verified *= factor
        self._accepted *= factor
        self._expected = None

    def __call__(self, promised: np.ndarray) -> np.ndarray:
        """float64 [n], the probabilities to expect; larger promises never expect less."""
        return np.interp(promised, _PROMISES, self._curve())

    def promises_for(self, expected: np.ndarray) -> np.ndarray:
        """float64 [n], what a drafter must promise for these probabilities to be expected; 1 where
        no promise is enough."""
        return np.interp(expected, self._curve(), _PROMISES)

    def _curve(self) -> np.ndarray:
        """float64, what to expect of the `_PROMISES`."""
        if self._expected is None:
            weights = self._verified + self._prior
            observed = (self._accepted + self._prior * _CENTRES) / weights
            observed = non_decreasing(observed, weights)
            self._expected = np.concatenate([[0.0], observed, observed[-1:]])
        return self._expected
