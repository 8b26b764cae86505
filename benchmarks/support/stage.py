"""One engine in which drafters take turns, so that all of them see the same minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.engines import Prompts, after_each_step, decode
from vllm_trie.drafts import DraftRequest
from vllm_trie.lab.local_engine import verifier_of
from vllm_trie.tree import TokenTree


class Turns:
    """Stands in for an engine's drafter and calls the one whose turn it is, under a node limit.

    Attributes:
        drafter: whose turn it is; None for no drafts.
        max_nodes: its limit.
        seconds: durations of its calls.
        predicted: sum of the predicted probabilities of its nodes.
    """

    name = "turns"
    needs_hidden_states = True

    def __init__(self) -> None:
        self.drafter: Any = None
        self.max_nodes = 0
        self.seconds: list[float] = []
        self.predicted = 0.0

    @property
    def needs_node_argmax(self) -> bool:
        return self.drafter is not None and self.drafter.needs_node_argmax

    @property
    def needs_rows(self) -> bool:
        return self.drafter is not None and self.drafter.needs_rows

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if self.drafter is None:
            return [TokenTree.empty()] * len(requests)
        for request in requests:
            request.max_nodes = min(request.max_nodes, self.max_nodes)
        start = time.perf_counter()
        trees = self.drafter.propose(requests)
        self.seconds.append(time.perf_counter() - start)
        estimates = (tree.probabilities for tree in trees if tree.probabilities is not None)
        self.predicted += float(sum(probabilities.sum() for probabilities in estimates))
        return trees

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        if self.drafter is not None:
            self.drafter.released(request, output)


@dataclass
class Counts:
    """Sums over the steps of a run.

    Attributes:
        steps: steps of each request.
        tokens: output tokens.
        nodes: verified nodes.
        window: those of them that belong to a lookahead window.
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    window: int = 0


class Stage:
    """An engine with draft trees, on which drafters take turns.

    Attributes:
        first_drafter: the drafter that the engine was started with.
        turns: what stands in its place.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.verifier: Any = verifier_of(llm)
        self.first_drafter = self.verifier.guard.drafter
        self.turns = Turns()
        self.verifier.guard.drafter = self.turns
        self._counts = Counts()
        self._verification_nodes: dict[str, int] = {}
        after_each_step(llm, self._count)

    def run(
        self,
        drafter: Any,
        max_nodes: int,
        prompts: Prompts,
        params: Any,
        batch_size: int,
    ) -> tuple[list[list[int]], Counts]:
        """Decode with a drafter, whose trees are verified whole; return the outputs and counts."""
        self.turns.drafter, self.turns.max_nodes = drafter, max_nodes
        self._counts, self._verification_nodes = Counts(), {}
        before = self.verifier.totals.steps, self.verifier.totals.tokens
        outputs = decode(self.llm, prompts, params, batch_size)
        counts, totals = self._counts, self.verifier.totals
        counts.steps, counts.tokens = totals.steps - before[0], totals.tokens - before[1]
        if any(self.verifier.guard.failures.values()):
            raise RuntimeError(f"{drafter.name} failed: {self.verifier.guard.failures}")
        return outputs, counts

    def _count(self, verifier: Any) -> None:
        for request_id, tree in zip(verifier.step.request_ids, verifier.step.trees, strict=True):
            self._counts.nodes += tree.num_nodes
            if tree.num_nodes and tree.never_accept is not None:
                candidates = int((~tree.never_accept).sum())
                candidates = self._verification_nodes.get(request_id, candidates)
                self._counts.window += tree.num_nodes - candidates
        # By now the drafter has proposed the trees of the next step.
        self._verification_nodes = dict(getattr(self.turns.drafter, "verification_nodes", {}))
