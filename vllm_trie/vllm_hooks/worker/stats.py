"""A worker's statistics of tree speculation, between two reports."""

from __future__ import annotations

from dataclasses import dataclass, field

STATS_ATTRIBUTE = "vllm_trie_stats"
"""Attribute of vLLM's ``ModelRunnerOutput`` that carries a :class:`TreeStats` to the scheduler."""
FILLERS_ATTRIBUTE = "vllm_trie_fillers"
"""Attribute of it with the number of a step's fillers by request id, on Model Runner V2."""


@dataclass(slots=True)
class TreeStats:
    """Sums since the last report.

    Attributes:
        steps: times that a request got new tokens, steps without a draft included.
        tokens: output tokens, accepted and bonus ones.
        drafting_seconds: time in the drafter.
        verification_seconds: time in the tree walk and the KV moves, without the forward pass.
        preparation_seconds: time to place the trees into the batch (positions, masks).
        bookkeeping_seconds: time around the drafter: requests built, trees checked and kept.
        draft_failures: failed drafts by reason, see
            :mod:`vllm_trie.vllm_hooks.worker.drafting.guard`.
    """

    steps: int = 0
    tokens: int = 0
    drafting_seconds: float = 0.0
    verification_seconds: float = 0.0
    preparation_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    draft_failures: dict[str, int] = field(default_factory=dict)

    def add(self, other: TreeStats) -> None:
        """Add another report to this one."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.drafting_seconds += other.drafting_seconds
        self.verification_seconds += other.verification_seconds
        self.preparation_seconds += other.preparation_seconds
        self.bookkeeping_seconds += other.bookkeeping_seconds
        for reason, count in other.draft_failures.items():
            self.draft_failures[reason] = self.draft_failures.get(reason, 0) + count
