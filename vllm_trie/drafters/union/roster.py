"""Which parts draft: one that is not worth its place rests, and is tried again.

A part is worth its `gross` (tokens per step that only its candidates bring) less its `cost` (tokens
per step that others' candidates would bring in the place of what it never wants accepted). Both are
judged in hindsight, see `hindsight.judge`; the cost is known even while the part rests.

Parts leave one at a time, and the others are judged anew after it: of two that propose the same,
neither brings anything beside the other. Parts that cost something begin at rest. A trial may cost
no more than a share of the tokens generated since the last one, so it comes soon where the others
find little and seldom where they find much; one that costs more than was expected ends early. After
a trial that failed the next has to wait longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_trie.drafters.union.hindsight import Judgement
from vllm_trie.drafters.union.record import LEAST_WORTH, SharedRecord, worst

PRIOR_COST = 1.0
"""What a part with a window is expected to cost, tokens per step."""
PRIOR_STEPS = 4
"""How many of its own steps a request must see to outweigh what earlier ones have shown."""
FEW_STEPS = 4
"""Judged steps of a request before its costs are believed; `PRIOR_COST` counts for as many."""
REQUEST_STEPS = 24
"""Judged steps of a request before a part may leave it."""
REQUEST_MEMORY = 128
"""Judged steps that a request remembers, the older ones less and less."""
TRIAL_STEPS = 24
"""Judged steps of a trial; the first third is not counted, a part may need to warm up."""


@dataclass(slots=True)
class _Tally:
    """Sums over judged steps of a part that drafts as a matter of course, or rests."""

    gross: float = 0.0
    gross_steps: int = 0
    cost: float = 0.0
    steps: int = 0

    @property
    def mean_cost(self) -> float:
        return self.cost / max(self.steps, 1)

    def add_cost(self, cost: float) -> None:
        """Take in what the part costs, or would cost, in a step."""
        self.cost, self.steps = _with_memory(self.cost, self.steps, cost)

    def add_gross(self, gross: float) -> None:
        """Take in what the part's candidates brought in a step."""
        self.gross, self.gross_steps = _with_memory(self.gross, self.gross_steps, gross)


@dataclass(slots=True)
class _Trial:
    """Sums over the judged steps of a trial."""

    reserve: float
    """What it may cost, tokens."""
    spent: float = 0.0
    """What it has cost, less what it has brought, tokens."""
    gross: float = 0.0
    """What its candidates brought after the warm-up, tokens."""
    net: float = 0.0
    """The same, less the cost."""
    steps: int = 0


class Roster:
    """The parts that draft for one request.

    Attributes:
        shared: what all requests have shown; changed as this one is judged.
        active: whether each part drafts as a matter of course, not in a trial.
    """

    def __init__(self, shared: SharedRecord) -> None:
        self.shared = shared
        self.active = list(shared.active)
        self._tallies = [_Tally() for _ in self.active]
        self._trials: dict[int, _Trial] = {}
        # Parts that have left; only a trial brings them back.
        self._barred = {
            p for p, active in enumerate(self.active) if not active and not shared.is_costly[p]
        }
        self._returns = list(shared.returns)
        self._steps = 0

    def next_step(self) -> list[int]:
        """The parts that draft now."""
        for part, active in enumerate(self.active):
            if not active and part not in self._trials:
                self._consider(part)
        return [p for p, active in enumerate(self.active) if active or p in self._trials]

    def record(self, judgement: Judgement) -> None:
        """Take in a judged step of this request."""
        regular = [p for p, active in enumerate(self.active) if active and p in judgement.worth]
        self.shared.record(judgement, regular)
        self._steps += 1
        for part, (gross, cost) in judgement.worth.items():
            tally = self._tallies[part]
            tally.add_cost(cost)
            if gross is None:
                continue
            if part in regular:
                tally.add_gross(gross)
            elif part in self._trials:
                self._record_trial(part, gross, cost)
            else:  # drafted in a trial that was over before this step was judged
                self.shared.allowance[part] -= cost - gross
        if self._steps < REQUEST_STEPS:
            return
        leaving = worst({p: self._worth(p) for p, active in enumerate(self.active) if active})
        if leaving is not None:
            self.active[leaving] = False
            self._barred.add(leaving)
            self._begin_anew()

    def end(self) -> None:
        """The request has ended; an unfinished trial goes to another one."""
        for part, trial in self._trials.items():
            self.shared.rested[part] = self.shared.wait[part]
            self.shared.allowance[part] += trial.reserve - trial.spent
        self._trials.clear()

    def _consider(self, part: int) -> None:
        """Whether a resting part should draft again."""
        shared, tally = self.shared, self._tallies[part]
        if shared.returns[part] != self._returns[part]:
            self._returns[part] = shared.returns[part]
            self._barred.discard(part)
        shared.rested[part] += 1
        if shared.is_costly[part] and tally.steps < FEW_STEPS:
            return
        is_known = part not in self._barred and shared.gross[part] is not None
        if is_known and self._worth(part) >= LEAST_WORTH:
            self._admit(part)
            return
        cost = 0.0
        if shared.is_costly[part]:
            known = PRIOR_COST * FEW_STEPS + tally.cost
            cost = TRIAL_STEPS * known / (FEW_STEPS + tally.steps)
        if shared.rested[part] >= shared.wait[part] and cost <= shared.allowance[part]:
            shared.rested[part] = 0
            shared.allowance[part] -= cost
            self._trials[part] = _Trial(cost)

    def _record_trial(self, part: int, gross: float, cost: float) -> None:
        trial, warm_up = self._trials[part], TRIAL_STEPS // 3
        trial.steps += 1
        trial.spent += cost - gross
        if trial.steps > warm_up:
            trial.gross += gross
            trial.net += gross - cost
        is_too_dear = trial.spent > trial.reserve and trial.spent > 0
        if trial.steps < TRIAL_STEPS and not is_too_dear:
            return
        del self._trials[part]
        self.shared.allowance[part] += trial.reserve - trial.spent
        counted = max(trial.steps - warm_up, 1)
        if is_too_dear or trial.net / counted < LEAST_WORTH:
            self.shared.keep_out(part, trial.gross / counted)
            self._barred.add(part)
            return
        self.shared.bring_back(part, trial.gross / counted)
        self._returns[part] = self.shared.returns[part]
        self._admit(part)

    def _admit(self, part: int) -> None:
        self._barred.discard(part)
        self.active[part] = True
        self._begin_anew()

    def _worth(self, part: int) -> float:
        """Gross less cost of a part in this request, tokens per step."""
        tally = self._tallies[part]
        prior = PRIOR_STEPS * self.shared.expected(part)
        gross = (prior + tally.gross) / (PRIOR_STEPS + tally.gross_steps)
        return gross - tally.mean_cost

    def _begin_anew(self) -> None:
        """Others' worth has changed with the parts that draft; costs are kept a little."""
        self._steps = 0
        for tally in self._tallies:
            tally.gross, tally.gross_steps = 0.0, 0
            tally.cost, tally.steps = FEW_STEPS * tally.mean_cost, min(tally.steps, FEW_STEPS)


def _with_memory(total: float, steps: int, value: float) -> tuple[float, int]:
    """A sum and its number of steps with another value; beyond the memory's end old values fade."""
    if steps >= REQUEST_MEMORY:
        return total * (1.0 - 1.0 / REQUEST_MEMORY) + value, steps
    return total + value, steps + 1
