"""Part selection: which parts draft, of those without forward passes.

Each part has a gain: the tokens per step that only its candidates contribute (see `evaluation`). A
part whose gain is too small is suspended and drafts again in trials, after a rest that doubles with
each trial that fails. A trial takes place in one request, as parts may need to warm up.

Parts are suspended one at a time, and the others are evaluated anew afterwards: of two parts that
propose the same, neither has a gain next to the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIN_GAIN = 0.02
"""Gain in tokens per step below which a part is suspended."""
PRIOR_GAIN = 0.3
"""Gain in tokens per step that is expected of a part without evaluated steps."""
PRIOR_STEPS = 8
"""Evaluated steps that it counts for."""
MEMORY = 256
"""Evaluated steps over which a gain is averaged."""
TRIAL_STEPS = 24
"""Evaluated steps of a trial. The first third does not count."""
RESTS = 32, 512
"""First and longest rest between trials, in steps of requests."""


@dataclass(slots=True)
class _Trial:
    """Sums over the evaluated steps of a trial; `gain`, in tokens, without the warm-up."""

    request_id: str
    steps: int = 0
    gain: float = 0.0


class Part:
    """What one part is worth over all requests.

    Attributes:
        active: Whether it drafts outside of trials.
        gain: In tokens per step.
    """

    def __init__(self) -> None:
        self.active = True
        self.gain = PRIOR_GAIN
        self._weight = PRIOR_STEPS
        self._rest = RESTS[0]
        self._rested = 0
        self._trial: _Trial | None = None

    def drafts(self, request_id: str) -> bool:
        """Return whether it drafts in a step of a request; counts the step."""
        if self.active:
            return True
        self._rested += 1
        if self._trial is None and self._rested >= self._rest:
            self._rested, self._trial = 0, _Trial(request_id)
        return self._trial is not None and self._trial.request_id == request_id

    def learn(self, request_id: str, gain: float) -> None:
        """Take in an evaluated step in which it drafted."""
        if self.active:
            self._weight = min(self._weight + 1, MEMORY)
            self.gain += (gain - self.gain) / self._weight
            return
        trial = self._trial
        if trial is None or trial.request_id != request_id:
            return
        trial.steps += 1
        trial.gain += gain if trial.steps > TRIAL_STEPS // 3 else 0.0
        if trial.steps == TRIAL_STEPS:
            mean = trial.gain / (TRIAL_STEPS - TRIAL_STEPS // 3)
            self._trial = None
            if mean < MIN_GAIN:
                self._rest = min(2 * self._rest, RESTS[1])
            else:
                self.active, self._rest = True, RESTS[0]
                self.evaluate_anew(mean)

    def evaluate_anew(self, expected: float) -> None:
        """Forget what was evaluated, because the parts that draft have changed."""
        self.gain, self._weight = expected, PRIOR_STEPS

    def end(self, request_id: str) -> None:
        """Let another request have the trial of one that has ended."""
        if self._trial is not None and self._trial.request_id == request_id:
            self._trial, self._rested = None, self._rest


class PartSelection:
    """The parts over all requests, by their indices."""

    def __init__(self, indices: Iterable[int]) -> None:
        self.parts = {index: Part() for index in indices}

    @property
    def active(self) -> list[int]:
        """The parts that draft outside of trials."""
        return [index for index, part in self.parts.items() if part.active]

    def drafting(self, request_id: str) -> list[int]:
        """Return the parts that draft in the next step of a request."""
        return [index for index, part in self.parts.items() if part.drafts(request_id)]

    def learn(self, request_id: str, gains: Mapping[int, float]) -> None:
        """Take in an evaluated step of a request."""
        for index, part in self.parts.items():
            if index in gains:
                part.learn(request_id, gains[index])
        active = [part for part in self.parts.values() if part.active]
        worst = min(reversed(active), key=lambda part: part.gain)
        if len(active) > 1 and worst.gain < MIN_GAIN:
            worst.active = False
            for part in active:
                part.evaluate_anew(max(part.gain, PRIOR_GAIN))

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        for part in self.parts.values():
            part.end(request_id)
