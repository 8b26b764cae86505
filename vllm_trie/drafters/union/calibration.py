"""One probability from what several drafters say, learned while they draft."""

from __future__ import annotations

import math
from collections.abc import Mapping

_RATE = 0.1
_LIMIT = 6.0
"""Log-odds are believed up to here, 0.25 % and 99.75 %."""


class Calibrator:
    """Logistic regression of "the node is accepted, given its parent" on the parts' log-odds.

    Which parts propose a node says as much as the probabilities they give it, so there is one
    regression for each set of parts. It begins with the parts' average log-odds, that is with the
    part's own probability where only one proposes. Learned by stochastic gradient with Adagrad's
    step sizes (Duchi et al. 2011, section 1.3), in plain floats and in the order of the calls:
    equal on every rank.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[int, ...], _Model] = {}

    def probability(self, edges: Mapping[int, float]) -> float:
        """Probability of an edge that the parts `edges.keys()` propose, at least one."""
        parts = tuple(edges)
        model = self._models.get(parts)
        if model is None:
            model = self._models[parts] = _Model(len(parts))
        return _sigmoid(model.log_odds([_log_odds(p) for p in edges.values()]))

    def learn(self, edges: Mapping[int, float], was_accepted: bool) -> None:
        """Take in what became of an edge whose parent was right."""
        parts = tuple(edges)
        model = self._models.get(parts)
        if model is None:
            model = self._models[parts] = _Model(len(parts))
        model.learn([_log_odds(p) for p in edges.values()], float(was_accepted))


class _Model:
    def __init__(self, num_parts: int) -> None:
        self._weights = [1.0 / num_parts] * num_parts + [0.0]
        self._squares = [1.0] * (num_parts + 1)

    def log_odds(self, features: list[float]) -> float:
        total = self._weights[-1]
        for weight, feature in zip(self._weights, features, strict=False):
            total += weight * feature
        return total

    def learn(self, features: list[float], outcome: float) -> None:
        error = _sigmoid(self.log_odds(features)) - outcome
        for i, feature in enumerate((*features, 1.0)):
            gradient = error * feature
            self._squares[i] += gradient * gradient
            self._weights[i] -= _RATE * gradient / math.sqrt(self._squares[i])


def _log_odds(probability: float) -> float:
    probability = min(max(probability, 1e-6), 1.0 - 1e-6)
    return min(max(math.log(probability / (1.0 - probability)), -_LIMIT), _LIMIT)


def _sigmoid(log_odds: float) -> float:
    log_odds = min(max(log_odds, -_LIMIT), _LIMIT)
    return 1.0 / (1.0 + math.exp(-log_odds))
