"""The acceptance rate of nodes, by predicted probability."""

from __future__ import annotations

import numpy as np

_EDGES = np.array(
    [0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96]
)
_CENTRES = np.array(
    [0.0015, 0.0045, 0.009, 0.018, 0.037, 0.075, 0.125, 0.175, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75,
     0.85, 0.93, 0.98]
)  # fmt: skip
_PREDICTED = np.concatenate([[0.0], _CENTRES, [1.0]])
_PRIOR = 15.0  # verified nodes that the predicted probability counts for in each bin
_FADING = 0.9


class AcceptanceCalibration:
    """Maps predicted probabilities to observed acceptance rates, monotonically, learned online.

    Nodes fall into bins by predicted probability. Each bin keeps a decaying count of verified and
    accepted nodes, and starts from the predicted probability itself.
    """

    def __init__(self) -> None:
        self._verified = np.zeros(len(_CENTRES))
        self._accepted = np.zeros(len(_CENTRES))
        self._expected: np.ndarray | None = None

    def observe(self, predicted: np.ndarray, accepted: np.ndarray) -> None:
        """Count verified nodes.

        Args:
            predicted: float [n], the drafter's probabilities.
            accepted: int [k], indices of the accepted nodes.
        """
        bins = np.searchsorted(_EDGES, predicted)
        self._verified += np.bincount(bins, minlength=len(_CENTRES))
        if len(accepted):
            self._accepted += np.bincount(bins[accepted], minlength=len(_CENTRES))
        self._expected = None

    def fade(self) -> None:
        """Let the counts weigh less."""
        self._verified *= _FADING
        self._accepted *= _FADING
        self._expected = None

    def __call__(self, predicted: np.ndarray) -> np.ndarray:
        """Return float64 [n], the expected acceptance rates, non-decreasing in `predicted`."""
        expected: np.ndarray = np.interp(predicted, _PREDICTED, self._curve())
        return expected

    def predicted_for(self, expected: float) -> float:
        """Return the predicted probability that gives this expected rate; 1 where no prediction is
        high enough."""
        return float(np.interp(expected, self._curve(), _PREDICTED))

    def _curve(self) -> np.ndarray:
        """Return float64, the expected rates at `_PREDICTED`."""
        if self._expected is None:
            observed = (self._accepted + _PRIOR * _CENTRES) / (self._verified + _PRIOR)
            observed = np.minimum.accumulate(observed[::-1])[::-1]
            self._expected = np.concatenate([[0.0], observed, observed[-1:]])
        return self._expected
