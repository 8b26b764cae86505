"""Statistics of the parts of a union over all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_trie.drafters.union.evaluation import StepEvaluation

MIN_NET_GAIN = 0.02
"""Net gain in tokens per step below which a part is suspended."""
PRIOR_GAIN = 0.3
"""Gain in tokens per step that is expected of a part without statistics."""
SHARED_STEPS = 256
"""Evaluated steps of all requests before a part is suspended for new requests."""
TRIAL_SHARE = 0.001
"""Share of the generated tokens that trials of a part may cost."""
FIRST_TRIAL_BUDGET = 1.0
"""Tokens that trials of a part may cost from the beginning."""
MIN_TRIAL_INTERVAL = 32
MAX_TRIAL_INTERVAL = 512
"""Steps between trials of a suspended part; doubled after each trial that fails."""
_MEMORY = 256.0
"""Evaluated steps over which a part's gain is averaged."""


@dataclass(slots=True)
class PartStatistics:
    """One part over all requests.

    Attributes:
        prior_cost: expected cost in tokens per step before it is measured; 0 for a part that takes
            nothing from the others.
        active: whether the part drafts for a new request from the first step.
        gain: mean gain in tokens per step; None if the part never drafted.
        trial_budget: tokens that further trials may cost.
        trial_interval: steps without the part before its next trial.
        suspended_steps: steps without the part since its last trial.
        num_reinstated: trials that succeeded.
    """

    prior_cost: float
    active: bool
    gain: float | None = None
    trial_budget: float = FIRST_TRIAL_BUDGET
    trial_interval: int = MIN_TRIAL_INTERVAL
    suspended_steps: int = 0
    num_reinstated: int = 0

    @property
    def expected_gain(self) -> float:
        """Tokens per step."""
        return PRIOR_GAIN if self.gain is None else self.gain

    def pass_trial(self, gain: float) -> None:
        """Note a trial that succeeded. Parts with a cost still begin suspended in new requests."""
        self.active = not self.prior_cost
        self.gain = gain
        self.trial_interval = MIN_TRIAL_INTERVAL
        self.num_reinstated += 1

    def fail_trial(self, gain: float) -> None:
        """Note a trial that failed."""
        self.gain = gain
        self.trial_interval = min(2 * self.trial_interval, MAX_TRIAL_INTERVAL)


class SharedStatistics:
    """All parts over all requests.

    Args:
        prior_costs: see `PartStatistics`. Parts with a cost begin suspended, except for the first
            part of a union in which every part has a cost.
    """

    def __init__(self, prior_costs: Sequence[float]) -> None:
        self.parts = [PartStatistics(cost, active=not cost) for cost in prior_costs]
        if all(prior_costs):
            self.parts[0].active = True
        self._steps = 0

    def update(self, evaluation: StepEvaluation, active: Sequence[int]) -> None:
        """Take in a step; `active` are the parts that drafted outside of a trial."""
        for part in self.parts:
            part.trial_budget += TRIAL_SHARE * evaluation.num_tokens
        for index in active:
            part, gain = self.parts[index], evaluation.parts[index].gain
            if gain is not None:
                expected = part.expected_gain
                part.gain = expected + (gain - expected) / _MEMORY
        self._steps += 1
        if self._steps < SHARED_STEPS:
            return
        gains = {
            index: part.expected_gain
            for index, part in enumerate(self.parts)
            if part.active and not part.prior_cost
        }
        suspended = part_to_suspend(gains)
        if suspended is not None:
            self.parts[suspended].active = False
            self._steps = 0
            for index in gains:
                self.parts[index].gain = max(gains[index], PRIOR_GAIN)


def part_to_suspend(net_gains: Mapping[int, float]) -> int | None:
    """Return the part with the smallest net gain, the last of equals; None if its gain suffices or
    it is the only part."""
    if len(net_gains) < 2:
        return None
    part = min(net_gains, key=lambda part: (net_gains[part], -part))
    return part if net_gains[part] < MIN_NET_GAIN else None
