"""Whoever watches the steps of an engine that drafts, without a part in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_trie.drafts.engine.tree_step import TreeStep
    from vllm_trie.hooks.wire import TreeStats
    from vllm_trie.tree import TokenTree


class StepObserver:
    """Is told of steps in the order of the methods here. It changes none of its arguments but the
    statistics, and its faults are its own: they must not reach the step."""

    def begun(self, requests: Sequence[NewRequestData]) -> None:
        """Requests start, or start again after a preemption."""

    def ended(self, step: TreeStep, new_tokens: Sequence[Sequence[int]], stats: TreeStats) -> None:
        """A step has ended.

        Args:
            step: With its trees and their accepted nodes.
            new_tokens: Of each request of the batch; none while its prefill goes on.
            stats: The engine's. An observer may add to its `counts` by :meth:`TreeStats.count`.
        """

    def drafted(
        self,
        request_ids: Sequence[str],
        drafts: Mapping[str, tuple[TokenTree, TokenTree]],
        has_failed: Callable[[str], bool],
    ) -> None:
        """The next step's drafts are there.

        Args:
            request_ids: Of the batch.
            drafts: The tree as it was proposed and as it is to be verified, by request id.
            has_failed: Whether the drafter failed for a request.
        """

    def released(self, request_id: str) -> None:
        """A request has ended."""

    def closed(self) -> None:
        """The engine ends."""
