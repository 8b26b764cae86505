"""The method `trie_union`: candidates of several drafters in one tree.

A step: the selected parts draft (`selection`), a trained drafter last and where its passes pay
(`forward_gate`), and parts that can draft again after the tokens of its chain (`grafting`). `merge`
puts all candidates into one trie, the `calibration` turns their probabilities into one, and the
likeliest nodes that fit become the tree.
Once the text has gone on, the draft teaches the calibration, and its `evaluation` the selection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafters import registry
from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest
from vllm_trie.drafters.neural import NeuralDrafter, NeuralOptions
from vllm_trie.drafters.union.calibration import Calibrator
from vllm_trie.drafters.union.evaluation import HORIZON, evaluate
from vllm_trie.drafters.union.forward_gate import ForwardGate
from vllm_trie.drafters.union.grafting import graft
from vllm_trie.drafters.union.merge import (
    Draft,
    Graft,
    UnionTree,
    build_tree,
    merge,
)
from vllm_trie.drafters.union.options import METHOD, TrieUnionOptions
from vllm_trie.drafters.union.selection import PartSelection
from vllm_trie.store import StoredText
from vllm_trie.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from torch import nn

_TAIL = 8  # tokens


class _State:
    """One request.

    Attributes:
        drafts: Those that are not evaluated yet, at most `HORIZON`.
        tail: Length and last tokens of the text at the last call.
        union: The last tree.
    """

    def __init__(self) -> None:
        self.drafts: deque[Draft] = deque()
        self.tail: tuple[int, list[int]] = (0, [])
        self.union: UnionTree | None = None

    def is_continued_by(self, tokens: np.ndarray) -> bool:
        """Return whether these tokens extend those of the last call."""
        length, last = self.tail
        return length <= len(tokens) and tokens[max(0, length - _TAIL) : length].tolist() == last


class TrieUnionDrafter(Drafter):
    """Merges the trees of its parts and keeps the likeliest nodes that fit.

    All candidates are evaluated, including those that did not fit.

    State: that of the parts, each request's candidates of the last steps, calibration, selection.

    Args:
        options, context: As for every drafter.
        parts: Drafters to use in place of those that the options name.

    Attributes:
        neural: The trained drafter among the parts, whose weights the engine loads.
        gate: Forgoes its forward passes where they do not pay; None where it drafts in each step:
            alone, and in a union that is not adaptive.
    """

    name: ClassVar[str] = METHOD
    Options: ClassVar[type[BaseModel]] = TrieUnionOptions

    def __init__(
        self,
        options: TrieUnionOptions,
        context: DrafterContext,
        parts: Sequence[Drafter] | None = None,
    ) -> None:
        super().__init__(options, context)
        self.parts = list(
            parts or [_make_part(entry, options, context) for entry in options.drafters]
        )
        self.neural = next((p for p in self.parts if isinstance(p, NeuralDrafter)), None)
        can_rest = options.adaptive and len(self.parts) > 1
        self.gate = ForwardGate() if can_rest and self.neural is not None else None
        self._neural_index = -1 if self.neural is None else self.parts.index(self.neural)
        self._last_end = 0.0
        # Class attributes of other drafters; here they follow from the parts.
        self.needs_hidden_states = any(part.needs_hidden_states for part in self.parts)  # type: ignore[misc]
        self.needs_node_argmax = any(part.needs_node_argmax for part in self.parts)  # type: ignore[misc]
        self.calibrator = Calibrator()
        self.selection = PartSelection(
            index
            for index, part in enumerate(self.parts)
            if self.gate is None or part is not self.neural
        )
        self._states: dict[str, _State] = {}

    @classmethod
    def check_files(
        cls, options: TrieUnionOptions, vocab_size: int, draft_model: str | None
    ) -> None:
        for name in options.drafters:
            if isinstance(name, NeuralOptions):
                continue  # vLLM reads the checkpoint's configuration
            part_options = registry.parse_options(name, options.of_part(name))
            part_class = registry.get_drafter_class(name)
            part_class.check_files(part_options, vocab_size, draft_model)

    def load_model(self, target_model: nn.Module) -> None:
        for part in self.parts:
            part.load_model(target_model)

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self.selection.end(request_id)
        for part in self.parts:
            part.release(request_id)

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:
        for part in self.parts:
            part.read_prompts(requests)

    def set_prompt_key(self, key: bytes) -> None:
        for part in self.parts:
            part.set_prompt_key(key)

    def save(self) -> list[StoredText]:
        return [text for part in self.parts for text in part.save()]

    def restore(self, texts: Sequence[StoredText]) -> None:
        for part in self.parts:
            part.restore(texts)

    @property
    def part_names(self) -> Sequence[str]:
        return [part.name for part in self.parts]

    def parts_of(self, request_id: str, tree: TokenTree) -> list[int]:
        return self._states[request_id].drafts[-1].parts_of(tree)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        num_tokens = sum(self._num_new_tokens(request) for request in requests)
        states = [self._updated_state(request) for request in requests]
        all_parts = list(range(len(self.parts)))
        drafting = [
            self.selection.drafting(request.request_id) if self.options.adaptive else all_parts
            for request in requests
        ]
        proposed: list[dict[int, TokenTree]] = [{} for _ in requests]
        for index, part in enumerate(self.parts):
            if part is self.neural:
                continue
            rows = [row for row, parts in enumerate(drafting) if index in parts]
            if not rows:
                continue
            trees = part.propose([_part_request(requests[r], states[r], index) for r in rows])
            for row, tree in zip(rows, trees, strict=True):
                proposed[row][index] = tree
        promised = [max(map(_promise, trees.values()), default=0.0) for trees in proposed]
        grafts = self._add_neural(requests, proposed, promised)
        merged = [
            self._merged_tree(request, state, trees, row_grafts, value)
            for request, state, trees, row_grafts, value in zip(
                requests, states, proposed, grafts, promised, strict=True
            )
        ]
        end = time.perf_counter()
        if self.gate is not None and self._last_end:
            self.gate.observe_step(num_tokens, end - self._last_end)
        self._last_end = end
        return merged

    def _num_new_tokens(self, request: DraftRequest) -> int:
        """Return the tokens of a request since the last call, 0 for a new one."""
        state = self._states.get(request.request_id)
        return 0 if state is None else max(0, len(request.token_ids) - state.tail[0])

    def _add_neural(
        self,
        requests: Sequence[DraftRequest],
        proposed: Sequence[dict[int, TokenTree]],
        promised: Sequence[float],
    ) -> list[list[Graft]]:
        """Add the trees of the trained drafter, where its passes pay, to those of the other parts.

        Returns:
            For each request what other parts draft after the tokens of its chain.
        """
        grafts: list[list[Graft]] = [[] for _ in requests]
        if self.neural is None:
            return grafts
        index = self._neural_index
        rows = list(range(len(requests))) if self.gate is None else self.gate.choose(promised)
        if not rows:
            return grafts
        start = time.perf_counter()
        trees = self.neural.propose([requests[row] for row in rows])
        for row, tree in zip(rows, trees, strict=True):
            proposed[row][index] = tree
        for part_index, part in enumerate(self.parts):
            drafted = [
                row for row in rows if part is not self.neural and part_index in proposed[row]
            ]
            if drafted:
                chains = [proposed[row][index] for row in drafted]
                of_rows = graft(part, part_index, [requests[row] for row in drafted], chains)
                for row, of_row in zip(drafted, of_rows, strict=True):
                    grafts[row] += of_row
        if self.gate is not None:
            self.gate.observe_call(len(rows), time.perf_counter() - start)
        return grafts

    def _updated_state(self, request: DraftRequest) -> _State:
        """Return the request's state, after evaluating drafts that its new tokens continue."""
        tokens = request.token_ids
        state = self._states.get(request.request_id)
        if state is None or not state.is_continued_by(tokens):
            state = self._states[request.request_id] = _State()
            self.selection.end(request.request_id)
        while state.drafts and len(tokens) - state.drafts[0].num_tokens >= HORIZON:
            draft = state.drafts.popleft()
            continuation = tokens[draft.num_tokens :][:HORIZON].tolist()
            self._calibrate(draft, continuation)
            if self.options.adaptive:
                gains = evaluate(draft, continuation)
                self.selection.learn(request.request_id, gains)
                if self.gate is not None and self._neural_index in gains:
                    self.gate.learn(draft.promised, gains[self._neural_index])
        state.tail = (len(tokens), tokens[-_TAIL:].tolist())
        return state

    def _calibrate(self, draft: Draft, continuation: list[int]) -> None:
        """Learn from all candidates whose parent was right."""
        merged = draft.merged
        right = {ROOT, *merged.true_path(continuation)}
        depth = {ROOT: 0}
        for node, parent in enumerate(merged.parents):
            if parent not in right:
                continue
            depth[node] = depth[parent] + 1
            if depth[node] <= len(continuation):
                self.calibrator.learn(merged.edges[node], len(draft.parts), node in right)

    def _merged_tree(
        self,
        request: DraftRequest,
        state: _State,
        trees: dict[int, TokenTree],
        grafts: Sequence[Graft],
        promised: float,
    ) -> TokenTree:
        merged = merge(trees, grafts)
        probabilities: list[float] = []
        for node, parent in enumerate(merged.parents):
            above = 1.0 if parent < 0 else probabilities[parent]
            edge = self.calibrator.probability(merged.edges[node], len(trees))
            probabilities.append(above * edge)
        num_tokens = len(request.token_ids)
        draft = Draft(merged, probabilities, [*trees], request.max_nodes, num_tokens, promised)
        state.drafts.append(draft)
        state.union = build_tree(draft, trees, request.chain_only)
        return state.union.tree


def _make_part(
    entry: str | NeuralOptions, options: TrieUnionOptions, context: DrafterContext
) -> Drafter:
    if isinstance(entry, NeuralOptions):
        return NeuralDrafter(entry, context)
    part_options = registry.parse_options(entry, options.of_part(entry))
    return registry.get_drafter_class(entry)(part_options, context)


def _promise(tree: TokenTree) -> float:
    """Return the accepted tokens that a tree's own probabilities promise."""
    return 0.0 if tree.probabilities is None else float(tree.probabilities.sum())


def _part_request(request: DraftRequest, state: _State, part: int) -> DraftRequest:
    """Return the request as a part sees it, with the verification of the part's own nodes."""
    last_step = state.union.step_of_part(request.last_step, part) if state.union else None
    # The minimum is for the union's probabilities, not for those of its parts.
    return replace(request, last_step=last_step, min_probability=0.0)
