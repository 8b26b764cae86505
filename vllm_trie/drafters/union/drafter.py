"""The method `trie_union`: candidates of several drafters in one tree.

A step: the selected parts draft (`selection`), `merge` puts their candidates into one trie, the
`calibration` turns their probabilities into one, and the likeliest nodes that fit become the tree.
Once the text has gone on, the draft teaches the calibration, and its `evaluation` the selection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafters import registry
from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest
from vllm_trie.drafters.union.calibration import Calibrator
from vllm_trie.drafters.union.evaluation import HORIZON, evaluate
from vllm_trie.drafters.union.merge import Draft, UnionTree, build_tree, merge, window_sizes
from vllm_trie.drafters.union.options import METHOD, TrieUnionOptions
from vllm_trie.drafters.union.selection import PartSelection
from vllm_trie.drafters.union.statistics import SharedStatistics
from vllm_trie.store import StoredText
from vllm_trie.tree import ROOT, TokenTree

WINDOW_COST = 1.0
"""Prior cost of a part with a window, tokens per step."""
_TAIL = 8
_OWN = "calibration."


class _State:
    """One request.

    Attributes:
        selection: the parts that draft.
        drafts: those that are not evaluated yet, at most `HORIZON`.
        tail: length and last tokens of the text at the last call.
        union: the last tree.
    """

    def __init__(self, shared: SharedStatistics) -> None:
        self.selection = PartSelection(shared)
        self.drafts: deque[Draft] = deque()
        self.tail: tuple[int, list[int]] = (0, [])
        self.union: UnionTree | None = None

    def is_continued_by(self, tokens: np.ndarray) -> bool:
        """Whether these tokens extend those of the last call."""
        length, last = self.tail
        return length <= len(tokens) and tokens[max(0, length - _TAIL) : length].tolist() == last


class TrieUnionDrafter(Drafter):
    """Merges the trees of its parts and keeps the likeliest nodes that fit.

    All candidates are evaluated, including those that did not fit. Never-accepted nodes of a part
    (the lookahead window) go into the tree whole or not at all, ahead of any candidates.

    State: that of the parts, each request's candidates of the last steps, calibration, statistics.

    Args:
        options, context: as for every drafter.
        parts: drafters to use in place of those that the options name.
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
            parts or [_make_part(name, options, context) for name in options.drafters]
        )
        # Class attributes of other drafters; here they follow from the parts.
        self.needs_hidden_states = any(part.needs_hidden_states for part in self.parts)  # type: ignore[misc]
        self.needs_node_argmax = any(part.needs_node_argmax for part in self.parts)  # type: ignore[misc]
        self.calibrator = Calibrator()
        has_window = [part.has_window for part in self.parts]
        # A guess until the part drafts for the first time.
        self._window_sizes = [context.num_nodes * 3 // 4 * window for window in has_window]
        self.shared = SharedStatistics([WINDOW_COST * window for window in has_window])
        self._states: dict[str, _State] = {}

    @classmethod
    def check_files(
        cls, options: TrieUnionOptions, vocab_size: int, draft_model: str | None
    ) -> None:
        for name in options.drafters:
            part_options = registry.parse_options(name, options.of_part(name))
            part_class = registry.get_drafter_class(name)
            part_class.check_files(part_options, vocab_size, draft_model)

    def load_model(self, target_model: Any) -> None:
        for part in self.parts:
            part.load_model(target_model)

    def release(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            state.selection.end()
        for part in self.parts:
            part.release(request_id)

    def finished_texts(self) -> Sequence[StoredText]:
        return [text for part in self.parts for text in part.finished_texts()]

    def restore_texts(self, texts: Sequence[StoredText]) -> None:
        for part in self.parts:
            part.restore_texts(texts)

    def successors(self) -> Sequence[StoredText]:
        return [observed for part in self.parts for observed in part.successors()]

    def restore_successors(self, successors: Sequence[StoredText]) -> None:
        for part in self.parts:
            part.restore_successors(successors)

    def learned(self) -> dict[str, list[float]]:
        found = {f"{_OWN}{name}": numbers for name, numbers in self.calibrator.state().items()}
        for part in self.parts:
            for name, numbers in part.learned().items():
                found[f"{part.name}.{name}"] = numbers
        return found

    def restore_learned(self, state: Mapping[str, Sequence[float]]) -> None:
        for part in self.parts:
            if of_part := _starting_with(f"{part.name}.", state):
                part.restore_learned(of_part)
        self.calibrator.restore(_starting_with(_OWN, state), len(self.parts))

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        states = [self._updated_state(request) for request in requests]
        all_parts = list(range(len(self.parts)))
        drafting = [
            state.selection.next_step() if self.options.adaptive else all_parts for state in states
        ]
        proposed: list[dict[int, TokenTree]] = [{} for _ in requests]
        for index, part in enumerate(self.parts):
            rows = [row for row, parts in enumerate(drafting) if index in parts]
            if not rows:
                continue
            trees = part.propose([_part_request(requests[r], states[r], index) for r in rows])
            for row, tree in zip(rows, trees, strict=True):
                proposed[row][index] = tree
        return [
            self._merged_tree(request, state, trees)
            for request, state, trees in zip(requests, states, proposed, strict=True)
        ]

    def _updated_state(self, request: DraftRequest) -> _State:
        """Return the request's state, after evaluating drafts that its new tokens continue."""
        tokens = request.token_ids
        state = self._states.get(request.request_id)
        if state is None or not state.is_continued_by(tokens):
            state = self._states[request.request_id] = _State(self.shared)
        while state.drafts and len(tokens) - state.drafts[0].num_tokens >= HORIZON:
            draft = state.drafts.popleft()
            continuation = tokens[draft.num_tokens :][:HORIZON].tolist()
            self._calibrate(draft, continuation)
            if self.options.adaptive:
                sizes = enumerate(self._window_sizes)
                suspended = {part: size for part, size in sizes if part not in draft.windows}
                state.selection.update(evaluate(draft, continuation, suspended))
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
                self.calibrator.learn(merged.edges[node], len(draft.windows), node in right)

    def _merged_tree(
        self, request: DraftRequest, state: _State, trees: dict[int, TokenTree]
    ) -> TokenTree:
        merged = merge(trees)
        probabilities: list[float] = []
        for node, parent in enumerate(merged.parents):
            above = 1.0 if parent < 0 else probabilities[parent]
            edge = self.calibrator.probability(merged.edges[node], len(trees))
            probabilities.append(above * edge)
        windows = window_sizes(trees, request.max_nodes)
        for part, size in windows.items():
            self._window_sizes[part] = size or self._window_sizes[part]
        draft = Draft(merged, probabilities, windows, request.max_nodes, len(request.token_ids))
        state.drafts.append(draft)
        state.union = build_tree(draft, trees, request.chain_only)
        return state.union.tree


def _starting_with(prefix: str, state: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the numbers whose names begin like this, without the beginning."""
    return {n.removeprefix(prefix): each for n, each in state.items() if n.startswith(prefix)}


def _make_part(name: str, options: TrieUnionOptions, context: DrafterContext) -> Drafter:
    part_options = registry.parse_options(name, options.of_part(name))
    return registry.get_drafter_class(name)(part_options, context)


def _part_request(request: DraftRequest, state: _State, part: int) -> DraftRequest:
    """Return the request as a part sees it, with the verification of the part's own nodes."""
    last_step = state.union.step_of_part(request.last_step, part) if state.union else None
    # The minimum is for the union's probabilities, not for those of its parts.
    return replace(request, last_step=last_step, min_probability=0.0)
