"""A step of Model Runner V2 between its launch and the time when the host takes it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_trie.drafts import DraftRequest, LogitsRows
from vllm_trie.drafts.engine.runners.v2_requests import RequestText
from vllm_trie.drafts.engine.tree_step import TreeStep

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens the host has not taken in.

    Attributes:
        step: Its trees.
        batch: As vLLM prepared it.
        texts: Of its requests.
        tokens, counts: [requests, N + 1] and [requests], the new tokens, once they have arrived.
        arrived: Tells when.
        likeliest, argmax: Of the rows of logits, where the drafter reads them.
        hidden_states: [tokens of the step, hidden_size].
        max_nodes: The scheduler's limit on the drafts after it.
    """

    step: TreeStep
    batch: InputBatch
    texts: Sequence[RequestText]
    tokens: np.ndarray
    counts: np.ndarray
    arrived: torch.cuda.Event
    likeliest: Arrays | None
    argmax: np.ndarray | None
    hidden_states: torch.Tensor | None
    max_nodes: int

    @property
    def has_arrived(self) -> bool:
        """Whether the tokens have arrived. Nobody can ask vLLM's stand-in for events on CPUs, whose
        work is always done."""
        return bool(getattr(self.arrived, "query", lambda: True)())

    def show_rows(self, request: DraftRequest, index: int) -> None:
        """Let a drafter know where the rows of a request's chain arrive, by its index in the batch;
        nothing is accepted yet."""
        if self.likeliest is not None:
            tree, first = self.step.trees[index], self.batch.cu_num_logits_np[index]
            rows = (array[first : first + tree.num_nodes + 1] for array in self.likeliest)
            request.rows = LogitsRows(tree, (), *rows)

    def hand_on_rows(self) -> None:
        """Hand what the drafter reads of rows of logits to the step, without those of fillers."""
        if self.likeliest is None and self.argmax is None:
            return
        drafted = self._drafted_rows()
        if self.likeliest is not None:
            tokens, probabilities = self.likeliest
            self.step.likeliest = tokens[drafted], probabilities[drafted]
        if self.argmax is not None:
            self.step.argmax = self.argmax[drafted]

    def drafted_states(self) -> torch.Tensor | None:
        """Return [rows, hidden_size], the hidden states of the same rows."""
        if self.hidden_states is None:
            return None
        rows = async_tensor_h2d(self._drafted_rows(), device=self.hidden_states.device)
        return self.hidden_states[self.batch.logits_indices[rows]]

    def _drafted_rows(self) -> np.ndarray:
        """Return int64 [rows], the rows of logits without those of fillers."""
        num_rows = np.array([tree.num_nodes + 1 for tree in self.step.trees])
        fillers_before = self.batch.cu_num_logits_np[:-1] - (num_rows.cumsum() - num_rows)
        rows: np.ndarray = np.arange(num_rows.sum()) + np.repeat(fillers_before, num_rows)
        return rows
