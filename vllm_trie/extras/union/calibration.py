"""Calibration: one probability from those that several parts predict, learned while they draft."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_LEARNING_RATE = 0.05
_LIMIT = 6.0
"""Log-odds are clipped here: 0.25 % and 99.75 %."""

# Initial weights, fitted on the shipped model (docs/lab_drafters.md).
_ALONE = 1.25
"""Weight of a part whose token no other part proposes. Such guesses, mostly below one half, come
true less often than the part predicts."""
_SHARED = 1.1
"""Sum of the weights of parts that agree."""
_AGREEMENT = 0.6
"""Log-odds that each further part adds by agreeing."""


class Calibrator:
    """Logistic regression of "the node is accepted, given its parent" on the parts' log-odds.

    There is one regression for each set of parts that propose a node and each number of parts that
    drafted: both say as much as the predicted probabilities. A part that drafts alone is believed
    at first. Learning is stochastic gradient descent with Adagrad's step sizes (Duchi et al. 2011,
    section 1.3) in plain floats and in the order of the calls, so all ranks agree.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[tuple[int, ...], int], _Model] = {}

    def probability(self, edges: Mapping[int, float], num_drafting: int) -> float:
        """Return the probability of a node, given its parent.

        Args:
            edges: The probability that each part predicts, of the parts that propose the node.
            num_drafting: Number of parts that drafted in this step.
        """
        model = self._model(edges, num_drafting)
        return _sigmoid(model.log_odds([_log_odds(p) for p in edges.values()]))

    def learn(self, edges: Mapping[int, float], num_drafting: int, was_accepted: bool) -> None:
        """Learn from a node whose parent was right."""
        model = self._model(edges, num_drafting)
        model.learn([_log_odds(p) for p in edges.values()], float(was_accepted))

    def _model(self, edges: Mapping[int, float], num_drafting: int) -> _Model:
        key = tuple(edges), num_drafting
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = _Model(len(edges), num_drafting)
        return model


class _Model:
    def __init__(self, num_proposing: int, num_drafting: int) -> None:
        if num_proposing > 1:
            weight, bias = _SHARED / num_proposing, _AGREEMENT * (num_proposing - 1)
        else:
            weight, bias = (_ALONE if num_drafting > 1 else 1.0), 0.0
        self._weights = [weight] * num_proposing + [bias]
        self._squares = [1.0] * (num_proposing + 1)

    def log_odds(self, features: Sequence[float]) -> float:
        total = self._weights[-1]
        for weight, feature in zip(self._weights, features, strict=False):
            total += weight * feature
        return total

    def learn(self, features: Sequence[float], outcome: float) -> None:
        error = _sigmoid(self.log_odds(features)) - outcome
        for i, feature in enumerate((*features, 1.0)):
            gradient = error * feature
            self._squares[i] += gradient * gradient
            self._weights[i] -= _LEARNING_RATE * gradient / math.sqrt(self._squares[i])


def _log_odds(probability: float) -> float:
    probability = min(max(probability, 1e-6), 1.0 - 1e-6)
    return min(max(math.log(probability / (1.0 - probability)), -_LIMIT), _LIMIT)


def _sigmoid(log_odds: float) -> float:
    log_odds = min(max(log_odds, -_LIMIT), _LIMIT)
    return 1.0 / (1.0 + math.exp(-log_odds))
