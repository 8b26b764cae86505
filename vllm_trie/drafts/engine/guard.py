"""Calling a drafter so that its faults cost drafts at most, never the engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from vllm_trie.drafts import Drafter, DraftRequest, PreparedDrafts
from vllm_trie.drafts.sources import DraftSource
from vllm_trie.hooks.wire import FAILURE_REASONS, FailureReason
from vllm_trie.tree import MalformedTreeError, TokenTree, check_all

_Result = TypeVar("_Result")
_EMPTY = TokenTree.empty()
_NO_TOKENS = np.empty(0, dtype=np.int32)
FIRST_PAUSE_S = 60.0
"""Pause of a drafter after the first call that took too long."""
LONGEST_PAUSE_S = 3600.0
_LONG_AFTER = 10
"""Times the next pause from the end of one, after which a late call counts as the first."""


class _TooLate(Exception):
    """A call of the drafter took longer than the time limit."""


class GuardedDrafter:
    """A drafter behind a guard.

    A request whose draft fails (an exception, a malformed tree) is decoded without drafts from
    then on; the other requests keep theirs. A drafter whose call took longer than the time limit
    rests, and is tried again after a pause that doubles with each such call, unless that comes long
    after the pause before. The check comes after the call: a call that never returns blocks the
    engine.

    Attributes:
        drafter: The drafter; may be replaced.
        sources: Add to its trees.
        seconds: Time spent in the drafter.
        failures: Number of failures by reason, since the start.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        time_limit_s: float,
        logger: logging.Logger,
        sources: Sequence[DraftSource] = (),
    ) -> None:
        self.drafter = drafter
        self.sources = sources
        self.seconds = 0.0
        self.failures: dict[FailureReason, int] = dict.fromkeys(FAILURE_REASONS, 0)
        self._vocab_size = vocab_size
        self._time_limit_s = time_limit_s
        self._logger = logger
        self._failed_requests: set[str] = set()
        self._rests_until = 0.0  # by time.perf_counter
        self._pause_s = FIRST_PAUSE_S
        self._handed_out: set[str] = set()  # requests that the drafter has not released
        self._unreleased: list[DraftRequest] = []  # those that ended meanwhile
        self._unlearned: set[str] = set()  # requests from before a reset
        self._reported = False
        self._new_failures: dict[str, int] = {}

    def prepare(
        self, requests: Sequence[DraftRequest], rows: Sequence[int], num_new: int
    ) -> PreparedDrafts | None:
        """Prepare drafts, see :meth:`Drafter.prepare`; None if they are to be proposed as usual."""
        if self._is_resting or not requests:
            return None
        if any(request.request_id in self._failed_requests for request in requests):
            return None
        if any(source.may_extend(request) for source in self.sources for request in requests):
            return None
        self._handed_out.update(request.request_id for request in requests)
        return self._attempt("preparing drafts", self.drafter.prepare, requests, rows, num_new)

    def draft_prepared(
        self, prepared: PreparedDrafts, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what was prepared, see :meth:`PreparedDrafts.draft`; None if that has failed, or
        is not of its form."""
        start = time.perf_counter()
        what = "drafting what was prepared"
        drafted = self._attempt(what, self._drafted_in_form, prepared, tokens, counts)
        self.seconds += time.perf_counter() - start
        return drafted

    def _drafted_in_form(
        self, prepared: PreparedDrafts, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        lengths, chains = prepared.draft(tokens, counts)
        num_drafts, width = chains.shape
        is_valid = (
            lengths.shape == (num_drafts,) == (len(prepared.request_ids),)
            and ((lengths >= 0) & (lengths <= width)).all()
        )
        if is_valid:  # anything may be behind a chain
            drafted = chains[np.arange(width) < lengths[:, None]]
            is_valid = ((drafted >= 0) & (drafted < self._vocab_size)).all()
        if not is_valid:
            raise MalformedTreeError(f"prepared drafts of {self.drafter.name!r}")
        return lengths, chains

    def propose(
        self, requests: Sequence[DraftRequest], prepared: PreparedDrafts | None = None
    ) -> list[TokenTree]:
        """Return a valid tree for each request, empty where the drafter has none or failed.

        The trees own their arrays: a drafter may use its own again.

        Args:
            requests: Of the batch.
            prepared: Has drafted for all of them already.
        """
        start = time.perf_counter()
        if start < self._rests_until:
            return [_EMPTY] * len(requests)
        unreleased, self._unreleased = self._unreleased, []
        for request in unreleased:
            self.release(request.request_id, request)
        active = requests
        if self._failed_requests:
            active = [r for r in requests if r.request_id not in self._failed_requests]
        if not active:
            return [_EMPTY] * len(requests)
        self._handed_out.update(request.request_id for request in active)
        propose = self.drafter.propose if prepared is None else prepared.trees
        proposed = self._propose_guarded(active, propose)
        self.seconds += time.perf_counter() - start
        if len(active) == len(requests):
            return proposed
        by_id = {r.request_id: tree for r, tree in zip(active, proposed, strict=True)}
        return [by_id.get(r.request_id, _EMPTY) for r in requests]

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:
        """Let the drafter take in new requests' prompts."""
        if not self._is_resting and requests:
            self._handed_out.update(request.request_id for request in requests)
            what = "reading prompts ahead of their drafts"
            self._attempt(what, self.drafter.read_prompts, requests)

    def release(self, request_id: str, ended: DraftRequest | None) -> None:
        """Forget a request that has ended.

        Args:
            request_id: Of the request.
            ended: The request with its whole text; None if it never gets drafts.
        """
        is_learned = request_id not in self._unlearned
        self._unlearned.discard(request_id)
        self._failed_requests.discard(request_id)
        if ended is None:
            return
        if self._is_resting or not is_learned:  # texts would pile up while it rests
            ended = replace(ended, token_ids=_NO_TOKENS, num_prompt_tokens=0, extra_args={})
        if self._is_resting:
            if request_id in self._handed_out:
                self._unreleased.append(ended)
            return
        self._handed_out.discard(request_id)
        output = ended.token_ids[ended.num_prompt_tokens :]
        try:
            self._call(self.drafter.released, ended, output)
        except _TooLate as error:
            self._rest(error)
        except Exception:
            self._report("error", f"forgetting request {request_id}")

    def reset(self, running: Collection[str]) -> None:
        """Let the drafter forget the outputs of ended requests, and learn nothing from those that
        are running: their texts began before."""
        self._unlearned.update(running)
        self.drafter.reset()

    def has_failed(self, request_id: str) -> bool:
        """Return whether a request gets no drafts, as the drafter failed."""
        return self._is_resting or request_id in self._failed_requests

    def switch_off(self, why: str) -> None:
        """Draft for nobody: the check at start-up found a fault."""
        self._rests_until = math.inf
        self.failures["start_check"] += 1
        self._new_failures["start_check"] = 1
        self._logger.error(
            "vllm-trie: this engine serves without drafts, as its check at start-up failed: %s. "
            "Please report this line with what `vllm-trie doctor` prints.",
            why,
        )

    def take_new_failures(self) -> dict[str, int]:
        """Return the number of failures since the last call, by reasons that had any."""
        taken, self._new_failures = self._new_failures, {}
        return taken

    def _attempt(
        self, what: str, method: Callable[..., _Result], *arguments: Any
    ) -> _Result | None:
        """Return ``method(*arguments)``; None if it fails, as it then fails again in a draft."""
        try:
            return self._call(method, *arguments)
        except _TooLate as error:
            self._rest(error)
        except Exception:
            self._logger.debug("%s failed", what, exc_info=True)
        return None

    def _call(self, method: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return ``method(*arguments)``; raise :class:`_TooLate` if that took too long."""
        deadline = time.perf_counter() + self._time_limit_s
        try:
            result = method(*arguments)
        except Exception as error:
            self._check_deadline(deadline, error)
            raise
        self._check_deadline(deadline)
        return result

    def _check_deadline(self, deadline: float, error: Exception | None = None) -> None:
        late_s = time.perf_counter() - deadline
        if late_s > 0:
            message = f"{late_s:.2g} s longer than draft_timeout_s={self._time_limit_s:g}"
            raise _TooLate(message) from error

    def _propose_guarded(
        self,
        requests: Sequence[DraftRequest],
        propose: Callable[[Sequence[DraftRequest]], list[TokenTree]],
    ) -> list[TokenTree]:
        if self._is_resting:  # since another request of the same batch
            return [_EMPTY] * len(requests)
        handed_out = list(requests)  # the drafter may change its list
        try:
            trees = self._call(propose, handed_out)
            if len(trees) != len(requests):
                raise MalformedTreeError(f"{len(trees)} trees for {len(requests)} requests")
            for source in self.sources:
                trees = source.extend(requests, trees)
        except _TooLate as error:
            self._rest(error)
            return [_EMPTY] * len(requests)
        except Exception as error:
            if len(requests) > 1:  # find the culprit, spare the others
                return [self._propose_guarded([request], propose)[0] for request in requests]
            reason: FailureReason = (
                "malformed" if isinstance(error, MalformedTreeError) else "error"
            )
            self._give_up(requests[0], reason)
            return [_EMPTY]
        return self._checked_batch(requests, trees)

    def _checked_batch(
        self, requests: Sequence[DraftRequest], trees: Sequence[TokenTree]
    ) -> list[TokenTree]:
        """Return trees that own their arrays; look at each only if not all are plainly valid."""
        try:
            valid = check_all(trees, self._vocab_size, self.drafter.reuses_arrays)
        except Exception:  # something among them is no tree
            valid = None
        if valid is None or any(
            tree.num_nodes > request.max_nodes or (request.chain_only and not tree.is_chain)
            for request, tree in zip(requests, valid, strict=True)
        ):
            return [
                self._checked(request, tree) for request, tree in zip(requests, trees, strict=True)
            ]
        return valid

    def _checked(self, request: DraftRequest, tree: TokenTree) -> TokenTree:
        """Return a copy of a valid tree; give the request up and return no nodes otherwise."""
        if tree is _EMPTY:
            return tree
        try:
            if not isinstance(tree, TokenTree):
                raise MalformedTreeError(f"a {type(tree).__name__} instead of a TokenTree")
            tree = self._in_vocabulary(request, tree).copy()
            tree.validate(self._vocab_size, request.max_nodes)
            if request.chain_only and not tree.is_chain:
                return tree.chain()
        except Exception:  # the check itself may stumble over what is no array
            self._give_up(request, "malformed")
            return _EMPTY
        return tree

    def _in_vocabulary(self, request: DraftRequest, tree: TokenTree) -> TokenTree:
        """Return a tree up to a placeholder of the request's images or sounds: some models have
        them outside the vocabulary, and their text is drafted from like all of it."""
        outside = np.flatnonzero(tree.token_ids >= self._vocab_size)
        if len(outside) and np.isin(tree.token_ids[outside], request.token_ids).all():
            return tree.prefix(int(outside[0]))
        return tree

    @property
    def is_off(self) -> bool:
        """Whether the check at start-up has failed."""
        return self._rests_until == math.inf

    @property
    def _is_resting(self) -> bool:
        return time.perf_counter() < self._rests_until

    def _rest(self, error: _TooLate) -> None:
        now = time.perf_counter()
        if now - self._rests_until > _LONG_AFTER * self._pause_s:
            self._pause_s = FIRST_PAUSE_S
        self._rests_until = now + self._pause_s
        self._report("timeout", f"{error}; drafting rests for {self._pause_s:g} s")
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _give_up(self, request: DraftRequest, reason: FailureReason) -> None:
        self._failed_requests.add(request.request_id)
        self._report(reason, f"request {request.request_id} is decoded without drafts")

    def _report(self, reason: FailureReason, consequence: str) -> None:
        """Count a failure; log the first as an error, and of the others pauses as warnings."""
        self.failures[reason] += 1
        self._new_failures[reason] = self._new_failures.get(reason, 0) + 1
        level = logging.WARNING if reason == "timeout" else logging.DEBUG
        level = level if self._reported else logging.ERROR
        self._reported = True
        self._logger.log(
            level,
            "vllm-trie: drafter %r failed (%s): %s. Output is not affected. Later failures of "
            "requests are logged at debug level and counted in vllm:trie_draft_failures_total.",
            self.drafter.name,
            reason,
            consequence,
            exc_info=True,
        )
