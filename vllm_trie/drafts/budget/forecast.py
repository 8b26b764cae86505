"""Lengths of drafts that are not known yet, of steps that are launched ahead of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_trie.drafts.budget.allocation import choose_nodes
from vllm_trie.drafts.budget.step_cost import StepCost

_RATE = 0.5  # of a request's last draft in its forecast
_COMMON_RATE = 0.05  # of a draft in the forecast of requests without any


class DraftForecast:
    """Expected acceptance rates of each request's next draft, by depth, from its last drafts.

    A depth that a draft does not reach counts as never accepted. A new request starts from the
    average of all drafts.

    Args:
        length: Of the longest draft.
    """

    def __init__(self, length: int) -> None:
        self._common = np.ones(length)
        self._rates: dict[str, np.ndarray] = {}

    def __call__(self, request_id: str) -> np.ndarray:
        """Return float64 [length], non-increasing."""
        return self._rates.get(request_id, self._common)

    def observe(self, drafts: Mapping[str, np.ndarray]) -> None:
        """Take in the expected rates of drafts, float [length of each], non-increasing, by request
        id."""
        if not drafts:
            return
        drafted = np.zeros((len(drafts), len(self._common)))
        for row, rates in zip(drafted, drafts.values(), strict=True):
            row[: len(rates)] = rates
        before = np.array([self(request_id) for request_id in drafts])
        self._rates.update(zip(drafts, before + _RATE * (drafted - before), strict=True))
        weight = 1.0 - (1.0 - _COMMON_RATE) ** len(drafts)
        self._common = self._common + weight * (drafted.mean(0) - self._common)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._rates.pop(request_id, None)


def planned_lengths(forecasts: Sequence[np.ndarray], cost: StepCost) -> list[int]:
    """Return the length of each draft that makes the most expected tokens per second.

    Args:
        forecasts: Rates by depth of each request of the step, down to its longest draft.
        cost: Of steps; whole drafts are planned until it is known.
    """
    longest = [len(rates) for rates in forecasts]
    if not cost.known or not any(longest):
        return longest
    num_requests = len(forecasts)
    seconds = cost.table(num_requests + sum(longest) + 1)
    keep, _ = choose_nodes(np.concatenate(forecasts), num_requests, seconds)
    return [int(part.sum()) for part in np.split(keep, np.cumsum(longest)[:-1])]
