"""Durations of drafting with Medusa heads and of the model's passes next to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from support.harness import Row
from support.stage import Turns


class TimedTurns(Turns):
    """Turns that also time what a drafter does apart from the products of its heads.

    Attributes:
        select: seconds for one request of all but the products, for each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.select: list[float] = []
        self._products = 0.0

    def time_heads(self, heads: Any) -> None:
        """Time the calls of these heads, a module of torch, from now on."""

        def begin(*unused: Any) -> None:
            self._products -= time.perf_counter()

        def end(*unused: Any) -> None:
            self._products += time.perf_counter()

        heads.register_forward_pre_hook(begin)
        heads.register_forward_hook(end)

    def propose(self, requests: Sequence[Any]) -> Any:
        start, self._products = time.perf_counter(), 0.0
        trees = super().propose(requests)
        if self._products:
            seconds = time.perf_counter() - start - self._products
            self.select.append(seconds / len(requests))
        return trees

    def take(self, skip: int = 0) -> Row:
        """Return medians over the calls since the last one, without the first `skip`; ms and us."""
        row = {
            "draft_ms": 1e3 * _median(self.seconds[skip:]),
            "select_us": 1e6 * _median(self.select[skip:]),
        }
        for values in (self.seconds, self.select):
            values.clear()
        return row


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def time_model(runner: Any) -> list[float]:
    """Return a list that grows by the seconds of each forward pass of the model."""
    seen: list[float] = []
    stock = runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = stock(*args, **kwargs)
        seen.append(time.perf_counter() - start)
        return output

    runner.execute_model = execute_model
    return seen
