"""Ranks that sleep while they wait for a message.

vLLM's processes poll for a second after each message. On two cores they thereby take the time of
those that they wait for.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

_WAIT_MS = 2


def let_ranks_sleep() -> None:
    """Replace the wait of this process and those that it forks."""
    stock = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        self.last_read = float("-inf")
        stock(self, _WAIT_MS if timeout_ms is None else min(timeout_ms, _WAIT_MS))

    SpinCondition.wait = wait  # type: ignore[method-assign]
