"""The duration of a decoding step."""

from __future__ import annotations

import time

_MEMORY = 0.05


class StepClock:
    """Times the engine's steps.

    A step is the time in the runner and the time of the engine between two calls of the runner
    (scheduling, detokenizing, answering), without drafting. The latter is averaged, because an
    idle engine waits there too.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._outside = 0.0

    def stop(self, started: float) -> float:
        """Return the seconds of the step that began at `started`; its tokens are known now."""
        inside = time.perf_counter() - started
        gap = min(started - self._ended, inside) if self._ended else 0.0
        self._outside += _MEMORY * (gap - self._outside)
        return inside + self._outside

    def leave(self) -> None:
        """Give control back to the engine."""
        self._ended = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Do not count seconds of drafting after the step."""
        self._ended += seconds
