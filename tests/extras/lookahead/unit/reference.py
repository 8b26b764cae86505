"""Lookahead decoding as the paper tells it, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.unit.drafters.decoding import Target


class Cell(NamedTuple):
    """A token of the lookahead branch."""

    level: int
    column: int
    token: int


def visible(cells: Sequence[Cell], cell: Cell) -> list[Cell]:
    """What a token of the lookahead branch sees of that branch, in order of position: level 0 up to
    its column and the lower levels of its column, and itself (Fu et al. 2024, section 3)."""
    seen = [
        other
        for other in cells
        if (other.level == 0 and other.column <= cell.column)
        or (other.column == cell.column and other.level <= cell.level)
    ]
    return sorted(seen, key=lambda other: other.column + other.level)


class TwoBranchDecoder:
    """Algorithm 2 of Fu et al. 2024, with every trajectory and every candidate on its own."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        first_level: Sequence[int],
        ngram_size: int,
        num_candidates: int,
    ) -> None:
        self.target = target
        self.tokens = list(prompt)
        self.num_levels = ngram_size - 1
        self.num_candidates = num_candidates
        self.levels = [list(first_level)]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.verified = 0
        """Tokens of the verification branch so far, each candidate counted whole."""

    def cells(self) -> list[Cell]:
        """The lookahead branch; level 0 of column 0 is the last token and not among them."""
        return [
            Cell(level, column, token)
            for level, tokens in enumerate(self.levels)
            for column, token in enumerate(tokens, start=1 if level == 0 else 0)
        ]

    def step(self) -> list[int]:
        """Decode; returns the new tokens."""
        last = self.tokens[-1]
        candidates = list(reversed(self.pool.get(last, [])))
        self.verified += sum(map(len, candidates))
        best: list[int] = []
        for candidate in candidates:
            accepted: list[int] = []
            for token in candidate:
                if self.target([*self.tokens, *accepted]) != token:
                    break
                accepted.append(token)
            best = max(best, accepted, key=len)
        self._look_ahead(last)
        new = [*best, self.target([*self.tokens, *best])]
        self.tokens += new
        return new

    def _look_ahead(self, last: int) -> None:
        cells = self.cells()
        highest = [cell for cell in cells if cell.level == len(self.levels) - 1]
        results = [
            self.target([*self.tokens, *(seen.token for seen in visible(cells, cell))])
            for cell in highest
        ]
        if len(self.levels) < self.num_levels:
            new = results if len(self.levels) == 1 else results[1:]
            self.levels = [level[1:] for level in self.levels] + [new]
            return
        for column, result in enumerate(results):
            first = last if column == 0 else self.levels[0][column - 1]
            rest = tuple(level[column] for level in self.levels[1:]) + (result,)
            continuations = self.pool.setdefault(first, [])
            if rest in continuations:
                continuations.remove(rest)
            continuations.append(rest)
            del continuations[: -self.num_candidates]
        self.levels = [self.levels[1][1:], *self.levels[2:], results]
