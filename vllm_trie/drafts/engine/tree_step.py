"""What the calls of a step pass on: its trees and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_trie.attention import TreeBatch
from vllm_trie.drafts import DraftRequest, LogitsRows, VerifiedStep
from vllm_trie.tree import TokenTree


@dataclass(slots=True)
class TreeStep:
    """The trees of a step and what became of them.

    Attributes:
        request_ids: Of the batch, in its order, as are the other sequences.
        trees: Of each request; empty ones without a draft.
        first_rows: Of the logits of each request, ``N + 1`` rows for one with N nodes, and more
            where its draft is filled up; the number of all rows is the last entry.
        accepted: Accepted nodes of each request; none before verification.
        num_decode_tokens: Tokens of the step; 0 with prefills among them, as its duration cannot be
            attributed to nodes then.
        started, ended: When it began, and when its tokens were known, by ``time.perf_counter``; 0
            where the time between is not its duration.
        is_pausing: Whether no drafts are wanted after it.
        least_probability: Of a node of the drafts after it.
        has_drafts: Whether it verifies any; True while they are not known yet.
        tree_batch: The trees that need tree attention.
        places: Of their nodes, see :func:`follow_depths`.
        path: On Model Runner V2 the query token of each row of logits, and the row whose KV belongs
            there, most often the same one: int64 [logits rows] each.
        likeliest: Tokens and probabilities of the rows of logits, see :class:`LogitsRows`; None
            where they are not read.
        argmax: int of each row of logits; None where the drafter does not need it.
        num_decoding: Requests that got tokens.
    """

    request_ids: Sequence[str] = ()
    trees: Sequence[TokenTree] = ()
    first_rows: Sequence[int] = ()
    accepted: Sequence[Sequence[int]] = ()
    num_decode_tokens: int = 0
    started: float = 0.0
    ended: float = 0.0
    is_pausing: bool = False
    least_probability: float = 0.0
    has_drafts: bool = False
    tree_batch: TreeBatch | None = None
    places: torch.Tensor | None = None
    path: tuple[torch.Tensor, torch.Tensor] | None = None
    likeliest: tuple[np.ndarray, np.ndarray] | None = None
    argmax: np.ndarray | None = None
    num_decoding: int = 0

    def paths_of(self, new_tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the accepted nodes of each request, as its output tokens show them.

        Args:
            new_tokens: The accepted ones and one more; none while a prefill goes on.
        """
        pairs = zip(self.trees, new_tokens, strict=True)
        return [tree.path_of(tokens[:-1]) for tree, tokens in pairs]

    def last_row(self, index: int) -> int:
        """Return the row of logits that gave a request's newest token."""
        path = self.accepted[index]
        return self.first_rows[index] + (path[-1] + 1 if path else 0)

    def show(self, request: DraftRequest, index: int) -> None:
        """Let a drafter see a request's part of the step, by its index in the batch."""
        argmax = None
        if self.argmax is not None:
            argmax = np.asarray(self.argmax[self._rows(index)], dtype=np.int32)
        path = tuple(self.accepted[index])
        request.last_step = VerifiedStep(self.trees[index], path, argmax)
        self.show_rows(request, index)

    def show_rows(self, request: DraftRequest, index: int) -> None:
        """Let a drafter see the rows of logits alone, whose content may come later."""
        if self.likeliest is not None:
            rows = (array[self._rows(index)] for array in self.likeliest)
            request.rows = LogitsRows(self.trees[index], tuple(self.accepted[index]), *rows)

    def _rows(self, index: int) -> slice:
        first = self.first_rows[index]
        return slice(first, first + self.trees[index].num_nodes + 1)
