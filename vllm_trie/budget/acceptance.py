"""The acceptance rate of nodes, by predicted probability."""

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
_PREDICTED = np.concatenate([[0.0], _CENTRES, [1.0]])
_PRIOR = 30.0  # verified nodes that the predicted probability counts for in each bin
_MEMORY = 1000.0  # verified nodes that a bin remembers


class AcceptanceCalibration:
    """Maps predicted probabilities to observed acceptance rates, monotonically, learned online.

    Nodes fall into bins by predicted probability. Each bin keeps a decaying count of verified and
    accepted nodes. It starts from the predicted probability itself, or from more where the drafter
    turns out to be too modest.
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
        full = self._verified > _MEMORY
        if full.any():
            self._accepted[full] *= _MEMORY / self._verified[full]
            self._verified[full] = _MEMORY
        self._expected = None

    def fade(self, factor: float) -> None:
        """Multiply all counts by `factor`."""
        self._verified *= factor
        self._accepted *= factor
        self._expected = None

    def __call__(self, predicted: np.ndarray) -> np.ndarray:
        """Return float64 [n], the expected acceptance rates, non-decreasing in `predicted`."""
        expected: np.ndarray = np.interp(predicted, _PREDICTED, self._curve())
        return expected

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Return float64 predicted probabilities and the expected rates there; between them the
        rates are linear."""
        return _PREDICTED, self._curve()

    def predicted_for(self, expected: np.ndarray) -> np.ndarray:
        """Return float64 [n], the predicted probabilities that give these expected rates; 1 where
        no prediction is high enough."""
        predicted: np.ndarray = np.interp(expected, self._curve(), _PREDICTED)
        return predicted

    def _prior_rates(self) -> np.ndarray:
        """Return float64, the rates that the bins start from.

        Where more nodes are accepted than predicted, the log-odds of all bins rise by those of the
        verified nodes: what was not verified for lack of promise is worth a try then.
        """
        accepted = self._accepted.sum() + _PRIOR
        expected = self._verified @ _CENTRES + _PRIOR
        total = self._verified.sum() + 2.0 * _PRIOR
        ratio = accepted / (total - accepted) * (total - expected) / expected
        odds = max(ratio, 1.0) * _CENTRES / (1.0 - _CENTRES)
        rates: np.ndarray = odds / (1.0 + odds)
        return rates

    def _curve(self) -> np.ndarray:
        """Return float64, the expected rates at `_PREDICTED`."""
        if self._expected is None:
            weights = self._verified + _PRIOR
            observed = (self._accepted + _PRIOR * self._prior_rates()) / weights
            observed = non_decreasing(observed, weights)
            self._expected = np.concatenate([[0.0], observed, observed[-1:]])
        return self._expected
