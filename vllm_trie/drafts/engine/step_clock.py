"""The duration of a decoding step."""

from __future__ import annotations

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

    def stop(self, started: float, ended: float) -> float:
        """Return the seconds of a step, whose tokens were known when it ended."""
        inside = ended - started
        gap = min(started - self._ended, inside) if self._ended else 0.0
        self._outside += _MEMORY * (gap - self._outside)
        return inside + self._outside

    def leave(self, ended: float) -> None:
        """Give control back to the engine, whose time counts as a step's, too."""
        self._ended = ended

    def leave_out(self, seconds: float) -> None:
        """Do not count seconds of drafting after the step."""
        self._ended += seconds
