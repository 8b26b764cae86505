"""Steps of Model Runner V2 between their launch and the time when the host takes in their tokens.

The host waits for the step after which it drafts. It leaves the others, and takes in their tokens
once they have arrived, before the next wait at the latest::

    launched    [ k - 2 ][ k - 1 ][ k ]
                 left     left     last: waited for, or left when k + 1 is launched
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.drafts.engine.runners.v2_requests import RequestText
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.drafts.engine.verifier import TreeVerifier
from vllm_trie.hooks.wire import WaitCause

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_MOST_AHEAD = 2
"""Steps that asynchronous scheduling launches before it reads an output."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens the host has not taken in.

    Attributes:
        step: Its trees.
        texts: Of its requests.
        tokens, counts: [requests, N + 1] and [requests], the new tokens, once they have arrived.
        arrived: Tells when.
        hidden_states: [logits rows, hidden_size], where the drafter reads them.
        max_nodes: The scheduler's limit on the drafts after it.
    """

    step: TreeStep
    texts: Sequence[RequestText]
    tokens: np.ndarray
    counts: np.ndarray
    arrived: torch.cuda.Event
    hidden_states: torch.Tensor | None
    max_nodes: int

    @property
    def has_arrived(self) -> bool:
        """Whether the tokens have arrived. Nobody can ask vLLM's stand-in for events on CPUs, whose
        work is always done."""
        return bool(getattr(self.arrived, "query", lambda: True)())


class StepsInFlight:
    """The steps whose tokens the host has not taken in.

    Args:
        verifier: Counts the waits; its budget observes steps that are left.
        take_in: Takes in a step whose tokens have arrived.

    Attributes:
        last: The step that was launched last, until the host waits for it or leaves it.
    """

    def __init__(self, verifier: TreeVerifier, take_in: Callable[[LaunchedStep], object]) -> None:
        self.last: LaunchedStep | None = None
        self._verifier = verifier
        self._take_in = take_in
        self._left: deque[LaunchedStep] = deque()  # oldest first
        self._num_launches = 0  # since the last wait
        self._launched_at = 0.0

    @property
    def only_last(self) -> bool:
        """Whether the tokens of all steps before the last one are taken in."""
        return not self._left

    @property
    def wait_cause(self) -> WaitCause | None:
        """Why the host waits for the last step's tokens; None if it does not."""
        if self.last is None or self.last.step.is_pausing or not self.last.max_nodes:
            return None
        return "pause_end" if self._num_launches else "drafting"

    def wait(self) -> LaunchedStep:
        """Wait for the last step's tokens, the one wait for the device; take in the steps before
        it, and return it."""
        last, cause = self.last, self.wait_cause
        assert last is not None, "a wait without a step"
        assert cause is not None, "a wait without a cause"
        last.arrived.synchronize()
        if not self._num_launches:  # of a step that began behind others, the duration is unknown
            last.step.ended = time.perf_counter()
        self._verifier.count_wait(cause)
        while self._left:
            self._take_in(self._left.popleft())
        self._num_launches, self.last = 0, None
        return last

    def leave_last(self, following: SchedulerOutput) -> None:
        """Go on to the next launch; leave the last step, if nobody has waited for it.

        Args:
            following: The step that is launched next.
        """
        now = time.perf_counter()
        seconds, self._launched_at = now - self._launched_at, now
        if self.last is not None:
            self._observe(self.last, following, seconds)
            self._left.append(self.last)
            self.last = None

    def take_in_arrived(self) -> None:
        """Take in the steps that were left whose tokens have arrived."""
        while self._left and self._left[0].has_arrived:
            self._take_in(self._left.popleft())

    def _observe(self, left: LaunchedStep, following: SchedulerOutput, seconds: float) -> None:
        """Let the budget observe the time between the launches of a step and of its successor."""
        self._num_launches += 1
        # One launch follows another as fast as steps end, once the engine is as far ahead as it
        # gets. After a while without work it goes on with other requests.
        step, budget = left.step, self._verifier.budget
        continues = not following.num_scheduled_tokens.keys().isdisjoint(step.request_ids)
        if budget is not None and self._num_launches > _MOST_AHEAD and continues:
            budget.observe_unwaited(step.num_decode_tokens, seconds)

    def forget_rows(self) -> None:
        """Leave out what rows of logits hold likely: they are of other weights."""
        for launched in (*self._left, self.last):
            if launched is not None:
                launched.step.likeliest = None

    def clear(self) -> None:
        """Forget all steps; nobody takes in their tokens."""
        self.last = None
        self._left.clear()
