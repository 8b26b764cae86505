"""What changes drafts before vLLM's scheduler plans a step with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.sampling_params import RequestOutputKind

from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.scheduler.draft_room import cut_drafts
from vllm_trie.extras import loaded
from vllm_trie.hooks.ledger.record import Result, Symbols
from vllm_trie.hooks.wire import InternalRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

GIVING_SHARE = 0.125
"""Share of the steps whose drafts may give way."""
MOST_GIVING = 4.0
"""Such steps in a row, after a time without any."""
_NEXT_DRAFTS = "_vllm_trie_next_drafts"


class FirstTokens:
    """Removes the drafts of a step that can start a streamed request.

    One forward pass verifies the drafts and computes the stream's prompt, and each draft token
    delays the first token of the answer. Where streams start in most steps, drafts stay in most of
    them: they end requests earlier, which frees places for those that wait.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._allowed = MOST_GIVING  # steps

    def remove_drafts(self) -> bool:
        """Remove the drafts of the running requests, if the next step is such a step.

        Returns:
            Whether drafts of the next step may be extended here.
        """
        self._allowed = min(self._allowed + GIVING_SHARE, MOST_GIVING)
        if self._allowed < 1.0 or not self._can_start_stream():
            return True
        drafted = [request for request in self._scheduler.running if request.spec_token_ids]
        for request in drafted:
            request.spec_token_ids = []
        if drafted:
            self._allowed -= 1.0
        return False

    def _can_start_stream(self) -> bool:
        scheduler = self._scheduler
        if not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_active_reqs:
            return False
        # One that waits would hide a stream behind it, and streams nothing itself.
        requests = (one for one in scheduler.waiting if not isinstance(one, InternalRequest))
        first = next(requests, None)
        params = None if first is None else first.sampling_params
        return params is not None and params.output_kind is not RequestOutputKind.FINAL_ONLY


class NextDrafts:
    """Changes the drafts of a scheduler's next step, in this order: removes, extends, cuts.

    Attributes:
        extensions: Parts of extras, whose ``extend_drafts()`` adds to the ``spec_token_ids`` of
            running requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._has_drafts = config.read(scheduler.vllm_config) is not None
        # On Model Runner V2 the worker has the drafts already, and they can only be cut.
        self._first_tokens = None if scheduler.use_v2_model_runner else FirstTokens(scheduler)
        self.extensions = [make(scheduler) for make in loaded("draft_extension")]

    def change(self) -> None:
        """Change the drafts of the running requests."""
        if not self._has_drafts:
            return
        if self._first_tokens is not None and self._first_tokens.remove_drafts():
            for extension in self.extensions:
                extension.extend_drafts()
        cut_drafts(self._scheduler)


def next_drafts(scheduler: Scheduler) -> NextDrafts:
    """Return what changes the drafts of a scheduler's next step."""
    changes: NextDrafts | None = getattr(scheduler, _NEXT_DRAFTS, None)
    if changes is None:
        changes = NextDrafts(scheduler)
        setattr(scheduler, _NEXT_DRAFTS, changes)
    return changes


@Symbols("v1.core.sched.scheduler:Scheduler.", "proposers learn that a request waits").wraps(
    "schedule",
    "removes the drafts of steps that start a stream, extends drafts, and cuts those that would "
    "split a prefill",
)
def schedule(
    original: Callable[..., Result], self: Scheduler, throttle_prefills: bool = False
) -> Result:
    next_drafts(self).change()
    return original(self, throttle_prefills)
