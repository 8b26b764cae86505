"""Which parts draft: one that brings nothing beside the others rests, and is tried again.

A part's gain is what `hindsight.gains` found, in tokens per step. Each request has its own roster,
because what pays differs from text to text; it begins with what earlier requests have shown. Parts
leave one at a time, and the others are judged anew after it: of two that propose the same, neither
gains anything beside the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_GAIN = 0.01
"""Tokens per step that a part must bring, to be worth its time."""
PRIOR_GAIN = 0.3
"""What is expected of a part that nothing is known about."""
PRIOR_STEPS = 8
"""How many of its own steps a request must see to outweigh what earlier ones have shown."""
REQUEST_STEPS = 12
"""Judged steps of a request before a part may leave it."""
SHARED_STEPS = 48
"""Judged steps of all requests before a part leaves for requests to come."""
TRIAL_STEPS = 24
"""Judged steps of a trial; the first third is not counted, a part may need to warm up."""
FIRST_WAIT = 128
LAST_WAIT = 4096
"""Steps without a part before it is tried again; doubled after each trial that fails."""
_MEMORY = 64.0


class SharedRecord:
    """What all requests together have shown of each part."""

    def __init__(self, num_parts: int) -> None:
        self.active = [True] * num_parts
        self.gain = [PRIOR_GAIN] * num_parts
        self.wait = [FIRST_WAIT] * num_parts
        self.rested = [0] * num_parts
        """Steps without the part since its last trial."""
        self.returns = [0] * num_parts
        """How often the part has come back."""
        self._steps = 0

    def record(self, gains: Mapping[int, float]) -> None:
        """Take in a judged step."""
        for part, gain in gains.items():
            self.gain[part] += (gain - self.gain[part]) / _MEMORY
        self._steps += 1
        if self._steps < SHARED_STEPS:
            return
        part = _worst(self.active, self.gain)
        if part is not None:
            self.active[part] = False
            self._expect_again()

    def bring_back(self, part: int, gain: float) -> None:
        """A trial has paid."""
        self.active[part] = True
        self.gain[part] = gain
        self.wait[part] = FIRST_WAIT
        self.returns[part] += 1

    def keep_out(self, part: int) -> None:
        """A trial has not paid."""
        self.wait[part] = min(2 * self.wait[part], LAST_WAIT)

    def _expect_again(self) -> None:
        self._steps = 0
        for part, active in enumerate(self.active):
            if active:
                self.gain[part] = max(self.gain[part], PRIOR_GAIN)


@dataclass(slots=True)
class _Tally:
    total: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class Roster:
    """The parts that draft for one request."""

    shared: SharedRecord
    active: list[bool] = field(init=False)
    _tallies: list[_Tally] = field(init=False)
    _trials: dict[int, _Tally] = field(init=False)
    _returns: list[int] = field(init=False)
    _steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.active = list(self.shared.active)
        self._tallies = [_Tally() for _ in self.active]
        self._trials = {}
        self._returns = list(self.shared.returns)
        self._steps = 0

    def next_step(self) -> list[int]:
        """The parts that draft now."""
        shared = self.shared
        for part, active in enumerate(self.active):
            if active or part in self._trials:
                continue
            if shared.returns[part] != self._returns[part]:
                self._admit(part)
                continue
            shared.rested[part] += 1
            if shared.rested[part] >= shared.wait[part]:
                shared.rested[part] = 0
                self._trials[part] = _Tally()
        return [p for p, active in enumerate(self.active) if active or p in self._trials]

    def record(self, gains: Mapping[int, float]) -> None:
        """Take in a judged step of this request."""
        regular = {part: gain for part, gain in gains.items() if self.active[part]}
        self.shared.record(regular)
        for part, gain in regular.items():
            self._tallies[part].total += gain
            self._tallies[part].steps += 1
        for part, trial in list(self._trials.items()):
            if part in gains:
                self._judge_trial(part, trial, gains[part])
        self._steps += 1
        if self._steps < REQUEST_STEPS:
            return
        worst = _worst(self.active, [self._estimate(part) for part in range(len(self.active))])
        if worst is not None:
            self.active[worst] = False
            self._begin_anew()

    def end(self) -> None:
        """The request has ended; an unfinished trial goes to another one."""
        for part in self._trials:
            self.shared.rested[part] = self.shared.wait[part]

    def _judge_trial(self, part: int, trial: _Tally, gain: float) -> None:
        trial.steps += 1
        warm_up = TRIAL_STEPS // 3
        if trial.steps > warm_up:
            trial.total += gain
        if trial.steps < TRIAL_STEPS:
            return
        del self._trials[part]
        mean = trial.total / (TRIAL_STEPS - warm_up)
        if mean > LEAST_GAIN:
            self.shared.bring_back(part, mean)
            self._admit(part)
        else:
            self.shared.keep_out(part)

    def _admit(self, part: int) -> None:
        self.active[part] = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._steps = 0
        self._returns = list(self.shared.returns)
        self._tallies = [_Tally() for _ in self.active]

    def _estimate(self, part: int) -> float:
        tally = self._tallies[part]
        prior = PRIOR_STEPS * self.shared.gain[part]
        return (prior + tally.total) / (PRIOR_STEPS + tally.steps)


def _worst(active: list[bool], gain: list[float]) -> int | None:
    """The active part that gains least, if that is too little and another one stays."""
    parts = [part for part, is_active in enumerate(active) if is_active]
    if len(parts) < 2:
        return None
    worst = min(parts, key=lambda part: (gain[part], -part))
    return worst if gain[worst] < LEAST_GAIN else None
