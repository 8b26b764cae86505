"""Calling a drafter so that whatever it does costs drafts at most, never the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal

from vllm_trie.drafters import Drafter, DraftRequest
from vllm_trie.tree import MalformedTreeError, TokenTree
from vllm_trie.vllm_hooks.worker.drafting.watchdog import TimeLimitExceeded, Watchdog

FailureReason = Literal["error", "malformed", "timeout"]
FAILURE_REASONS: tuple[FailureReason, ...] = ("error", "malformed", "timeout")

_EMPTY = TokenTree.empty()


class GuardedDrafter:
    """A drafter behind a guard.

    A request whose draft fails (an exception, a malformed tree) is decoded plainly from then on;
    the other requests of the batch keep their drafts. A drafter that exceeds the time limit is
    switched off for all requests: nobody can wait for it again and again.

    Attributes:
        seconds: time spent in the drafter.
        failures: number of failures by reason, since the start.
    """

    def __init__(
        self, drafter: Drafter, vocab_size: int, time_limit_s: float, logger: logging.Logger
    ) -> None:
        self.drafter = drafter
        self.seconds = 0.0
        self.failures: dict[FailureReason, int] = dict.fromkeys(FAILURE_REASONS, 0)
        self._vocab_size = vocab_size
        self._watchdog = Watchdog(time_limit_s)
        self._logger = logger
        self._failed_requests: set[str] = set()
        self._switched_off = False
        self._reported = False
        self._new_failures: dict[FailureReason, int] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """A valid tree for each request, empty where the drafter has none or failed."""
        start = time.perf_counter()
        active = requests
        if self._failed_requests:
            active = [r for r in requests if r.request_id not in self._failed_requests]
        if self._switched_off or not active:
            return [TokenTree.empty()] * len(requests)
        proposed = self._propose_guarded(active)
        self.seconds += time.perf_counter() - start
        if len(active) == len(requests):
            return proposed
        by_id = {r.request_id: tree for r, tree in zip(active, proposed, strict=True)}
        return [by_id.get(r.request_id, TokenTree.empty()) for r in requests]

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._failed_requests.discard(request_id)
        if self._switched_off:
            return
        try:
            self._watchdog.call(lambda: self.drafter.release(request_id))
        except TimeLimitExceeded as error:
            self._switch_off(error)
        except Exception:
            self._report("error", f"forgetting request {request_id}")

    def take_new_failures(self) -> dict[FailureReason, int]:
        """Number of failures by reason since the last call, without reasons that had none."""
        taken, self._new_failures = self._new_failures, {}
        return taken

    def _propose_guarded(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if self._switched_off:  # by another request of this very batch
            return [TokenTree.empty()] * len(requests)
        handed_out = list(requests)  # the drafter may do with its list as it likes
        try:
            trees = self._watchdog.call(lambda: self.drafter.propose(handed_out))
            if len(trees) != len(requests):
                raise MalformedTreeError(f"{len(trees)} trees for {len(requests)} requests")
        except TimeLimitExceeded as error:
            self._switch_off(error)
            return [TokenTree.empty()] * len(requests)
        except Exception as error:
            if len(requests) > 1:  # find the culprit, spare the others
                return [self._propose_guarded([request])[0] for request in requests]
            reason = "malformed" if isinstance(error, MalformedTreeError) else "error"
            self._give_up(requests[0], reason)
            return [TokenTree.empty()]
        return [self._checked(request, tree) for request, tree in zip(requests, trees, strict=True)]

    def _checked(self, request: DraftRequest, tree: TokenTree) -> TokenTree:
        """The tree if it obeys the rules; otherwise an empty one, and the request is given up."""
        if tree is _EMPTY:
            return tree
        try:
            if not isinstance(tree, TokenTree):
                raise MalformedTreeError(f"a {type(tree).__name__} instead of a TokenTree")
            tree.validate(self._vocab_size, request.max_nodes)
            if request.chain_only and not tree.is_chain:
                return tree.chain()
        except Exception:  # the check itself may stumble over what is no array at all
            self._give_up(request, "malformed")
            return TokenTree.empty()
        return tree

    def _switch_off(self, error: TimeLimitExceeded) -> None:
        self._switched_off = True
        self._report("timeout", f"{error}; drafting is switched off")

    def _give_up(self, request: DraftRequest, reason: FailureReason) -> None:
        self._failed_requests.add(request.request_id)
        self._report(reason, f"request {request.request_id} is decoded without drafts")
        try:
            self._watchdog.call(lambda: self.drafter.release(request.request_id))
        except TimeLimitExceeded as error:
            self._switch_off(error)
        except Exception:
            self._logger.debug("release after a failed draft failed too", exc_info=True)

    def _report(self, reason: FailureReason, consequence: str) -> None:
        """Count a failure; the first is logged with its traceback, the rest at debug level."""
        self.failures[reason] += 1
        self._new_failures[reason] = self._new_failures.get(reason, 0) + 1
        level = logging.DEBUG if self._reported else logging.ERROR
        self._reported = True
        self._logger.log(
            level,
            "vllm-trie: drafter %r failed (%s): %s. Output is not affected. Later failures are "
            "logged at debug level and counted in vllm:trie_draft_failures_total.",
            self.drafter.name,
            reason,
            consequence,
            exc_info=True,
        )
