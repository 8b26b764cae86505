"""What all requests together have shown of the parts of a union."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_trie.drafters.union.hindsight import Judgement

LEAST_WORTH = 0.02
"""Tokens per step that a part must bring, to be worth its time."""
PRIOR_GROSS = 0.3
"""What is expected of a part that nothing is known about."""
SHARED_STEPS = 256
"""Judged steps of all requests before a part leaves for requests to come."""
TRIAL_SHARE = 0.001
"""Share of the generated tokens that trials of a part may cost."""
FIRST_ALLOWANCE = 1.0
"""Tokens that trials of a part may cost from the beginning."""
FIRST_WAIT = 32
LAST_WAIT = 512
"""Steps without a part before it is tried again; doubled after each trial that fails."""
_MEMORY = 256.0
"""Judged steps that the mean worth of a part is taken over."""


class SharedRecord:
    """What all requests together have shown of each part.

    Args:
        is_costly: whether each part takes nodes for what is never accepted.

    Attributes:
        active: whether each part drafts for a new request from its beginning.
        gross: worth of each part before its cost, tokens per step; None if it never drafted.
        wait: steps without each part before it is tried again.
        rested: steps without each part since its last trial.
        allowance: tokens that trials of each part may cost now, beside those that are under way.
        returns: how often a trial of each part has paid.
    """

    def __init__(self, is_costly: Sequence[bool]) -> None:
        self.is_costly = list(is_costly)
        self.active = [not costly for costly in is_costly]
        if not any(self.active):
            self.active[0] = True
        num_parts = len(self.active)
        self.gross: list[float | None] = [None] * num_parts
        self.wait = [FIRST_WAIT] * num_parts
        self.rested = [0] * num_parts
        self.allowance = [FIRST_ALLOWANCE] * num_parts
        self.returns = [0] * num_parts
        self._steps = 0

    def expected(self, part: int) -> float:
        """Gross worth of a part, tokens per step."""
        known = self.gross[part]
        return PRIOR_GROSS if known is None else known

    def record(self, judgement: Judgement, drafted: Sequence[int]) -> None:
        """Take in a judged step; `drafted` are the parts that drafted as a matter of course."""
        for part in range(len(self.active)):
            self.allowance[part] += TRIAL_SHARE * judgement.num_tokens
        for part in drafted:
            gross = judgement.worth[part].gross
            if gross is not None:
                expected = self.expected(part)
                self.gross[part] = expected + (gross - expected) / _MEMORY
        self._steps += 1
        if self._steps < SHARED_STEPS:
            return
        worth = {
            part: self.expected(part)
            for part, active in enumerate(self.active)
            if active and not self.is_costly[part]
        }
        part = worst(worth)
        if part is not None:
            self.active[part] = False
            self._steps = 0
            for other in worth:
                self.gross[other] = max(self.expected(other), PRIOR_GROSS)

    def bring_back(self, part: int, gross: float) -> None:
        """A trial has paid."""
        self.active[part] = not self.is_costly[part]
        self.gross[part] = gross
        self.wait[part] = FIRST_WAIT
        self.returns[part] += 1

    def keep_out(self, part: int, gross: float) -> None:
        """A trial has not paid."""
        self.gross[part] = gross
        self.wait[part] = min(2 * self.wait[part], LAST_WAIT)


def worst(worth: Mapping[int, float]) -> int | None:
    """The part that is worth least, the last of equals, if that is too little and others stay."""
    if len(worth) < 2:
        return None
    part = min(worth, key=lambda part: (worth[part], -part))
    return part if worth[part] < LEAST_WORTH else None
