"""Part selection: which parts draft for a request.

Each part has a gain (tokens per step that only its candidates contribute) and a cost (tokens per
step that it takes from the others), see `evaluation`. A part whose net gain is too small is
suspended, and drafts again in trials from time to time. The cost of a window is known even while
its part is suspended.

Parts are suspended one at a time, and the others are evaluated anew afterwards: of two parts that
propose the same, neither has a gain next to the other. Parts with a cost begin suspended. A trial
may cost a small share of the tokens generated since the last one: trials are frequent where the
others find little and rare where they find much. A trial that exceeds its budget ends early. After
a failed trial the next one has to wait longer.

Another kind of cost, such as drafting time, needs a prior in `PartStatistics` and a measurement in
`PartEvaluation`, both in tokens per step.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_trie.drafters.union.evaluation import StepEvaluation
from vllm_trie.drafters.union.statistics import (
    MIN_NET_GAIN,
    PartStatistics,
    SharedStatistics,
    part_to_suspend,
)

PRIOR_STEPS = 4
"""Steps of its own that a request must see to outweigh the statistics of other requests."""
FEW_STEPS = 4
"""Evaluated steps of a request before its costs count; the weight of a part's prior cost."""
REQUEST_STEPS = 24
"""Evaluated steps of a request before a part is suspended in it."""
REQUEST_MEMORY = 128
"""Evaluated steps over which a request's sums are kept; older steps fade."""
TRIAL_STEPS = 24
"""Evaluated steps of a trial. The first third does not count: parts may need to warm up."""


@dataclass(slots=True)
class _Trial:
    """Sums over the evaluated steps of a trial, in tokens."""

    budget: float
    spent: float = 0.0
    """Cost less gain."""
    gain: float = 0.0
    """After the warm-up, as is `net_gain`."""
    net_gain: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class _Sum:
    """A sum over steps; beyond the request's memory old values fade."""

    total: float = 0.0
    steps: int = 0

    def add(self, value: float) -> None:
        if self.steps < REQUEST_MEMORY:
            self.total += value
            self.steps += 1
        else:
            self.total = self.total * (1.0 - 1.0 / REQUEST_MEMORY) + value

    @property
    def mean(self) -> float:
        return self.total / max(self.steps, 1)


class _Part:
    """One part in one request."""

    def __init__(self, shared: PartStatistics) -> None:
        self.shared = shared
        self.active = shared.active
        # An excluded part comes back through a trial only, in this request or in another one.
        self.is_excluded = not shared.active and not shared.prior_cost
        self.num_reinstated = shared.num_reinstated
        self.trial: _Trial | None = None
        self.gain = _Sum()
        self.cost = _Sum()

    @property
    def net_gain(self) -> float:
        """Tokens per step in this request."""
        prior = PRIOR_STEPS * self.shared.expected_gain
        gain = (prior + self.gain.total) / (PRIOR_STEPS + self.gain.steps)
        return gain - self.cost.mean


class PartSelection:
    """The parts that draft for one request.

    Args:
        shared: statistics of all requests, updated with the steps of this one.
    """

    def __init__(self, shared: SharedStatistics) -> None:
        self.shared = shared
        self._parts = [_Part(part) for part in shared.parts]
        self._steps = 0

    @property
    def active(self) -> list[int]:
        """The parts that draft outside of trials."""
        return [index for index, part in enumerate(self._parts) if part.active]

    def next_step(self) -> list[int]:
        """Return the parts that draft in the next step."""
        for part in self._parts:
            if not part.active and part.trial is None and self._should_reinstate(part):
                self._reinstate(part)
        return [index for index, part in enumerate(self._parts) if part.active or part.trial]

    def update(self, evaluation: StepEvaluation) -> None:
        """Take in an evaluated step of this request."""
        drafting = [index for index in self.active if index in evaluation.parts]
        self.shared.update(evaluation, drafting)
        self._steps += 1
        for index, (gain, cost) in evaluation.parts.items():
            part = self._parts[index]
            part.cost.add(cost)
            if gain is None:
                continue
            if part.active:
                part.gain.add(gain)
            elif part.trial is not None:
                self._update_trial(part, part.trial, gain, cost)
            else:  # drafted in a trial that has ended since
                part.shared.trial_budget -= cost - gain
        if self._steps < REQUEST_STEPS:
            return
        suspended = part_to_suspend({index: self._parts[index].net_gain for index in self.active})
        if suspended is not None:
            self._parts[suspended].active = False
            self._parts[suspended].is_excluded = True
            self._begin_anew()

    def end(self) -> None:
        """Hand unfinished trials to another request, as this one has ended."""
        for part in self._parts:
            if part.trial is not None:
                part.shared.suspended_steps = part.shared.trial_interval
                part.shared.trial_budget += part.trial.budget - part.trial.spent
                part.trial = None

    def _should_reinstate(self, part: _Part) -> bool:
        """Whether a suspended part is known to be worth its cost; begins a trial if one is due."""
        shared = part.shared
        if shared.num_reinstated != part.num_reinstated:
            part.num_reinstated = shared.num_reinstated
            part.is_excluded = False
        shared.suspended_steps += 1
        if shared.prior_cost and part.cost.steps < FEW_STEPS:
            return False
        is_known = not part.is_excluded and shared.gain is not None
        if is_known and part.net_gain >= MIN_NET_GAIN:
            return True
        cost = 0.0
        if shared.prior_cost:
            known = shared.prior_cost * FEW_STEPS + part.cost.total
            cost = TRIAL_STEPS * known / (FEW_STEPS + part.cost.steps)
        if shared.suspended_steps >= shared.trial_interval and cost <= shared.trial_budget:
            shared.suspended_steps = 0
            shared.trial_budget -= cost
            part.trial = _Trial(cost)
        return False

    def _update_trial(self, part: _Part, trial: _Trial, gain: float, cost: float) -> None:
        warm_up = TRIAL_STEPS // 3
        trial.steps += 1
        trial.spent += cost - gain
        if trial.steps > warm_up:
            trial.gain += gain
            trial.net_gain += gain - cost
        exceeds_budget = trial.spent > trial.budget and trial.spent > 0
        if trial.steps < TRIAL_STEPS and not exceeds_budget:
            return
        part.trial = None
        part.shared.trial_budget += trial.budget - trial.spent
        counted = max(trial.steps - warm_up, 1)
        if exceeds_budget or trial.net_gain / counted < MIN_NET_GAIN:
            part.shared.fail_trial(trial.gain / counted)
            part.is_excluded = True
            return
        part.shared.pass_trial(trial.gain / counted)
        part.num_reinstated = part.shared.num_reinstated
        self._reinstate(part)

    def _reinstate(self, part: _Part) -> None:
        part.active, part.is_excluded = True, False
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget gains and most of the costs, because the parts that draft have changed."""
        self._steps = 0
        for part in self._parts:
            part.gain = _Sum()
            part.cost = _Sum(FEW_STEPS * part.cost.mean, min(part.cost.steps, FEW_STEPS))
