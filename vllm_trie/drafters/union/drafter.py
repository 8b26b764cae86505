"""The method `trie_union`: candidates of several drafters in one tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafters import registry
from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest, VerifiedStep
from vllm_trie.drafters.union.calibration import Calibrator
from vllm_trie.drafters.union.hindsight import HORIZON, Draft, judge
from vllm_trie.drafters.union.merge import merge
from vllm_trie.drafters.union.options import METHOD, TrieUnionOptions
from vllm_trie.drafters.union.record import SharedRecord
from vllm_trie.drafters.union.roster import Roster
from vllm_trie.drafters.union.tree import UnionTree, build_tree
from vllm_trie.tree import ROOT, TokenTree

_TAIL = 8


class _State:
    """One request."""

    def __init__(self, shared: SharedRecord) -> None:
        self.roster = Roster(shared)
        self.drafts: deque[Draft] = deque()
        """Those that are not judged yet."""
        self.tail: tuple[int, list[int]] = (0, [])
        """Length and last tokens of the text at the last call."""
        self.union: UnionTree | None = None
        self.parts: dict[int, TokenTree] = {}
        """The parts' trees that the last tree was made of."""

    def is_continued_by(self, tokens: np.ndarray) -> bool:
        """Whether these tokens go on from those of the last call."""
        length, last = self.tail
        return length <= len(tokens) and tokens[max(0, length - _TAIL) : length].tolist() == last


class TrieUnionDrafter(Drafter):
    """Merges the trees of its parts and keeps the likeliest nodes that fit.

    A part's probabilities are calibrated, and combined where several parts propose a node, by what
    became of earlier candidates. All candidates are judged, also those that did not fit: once the
    text has gone on it is known which were right. The same judgement tells what each part gained
    beside the others; parts that gain nothing rest (see `roster`). Nodes that a part never wants
    accepted (the lookahead window) go into the tree whole, in front of candidates of any part.

    State: that of its parts, candidates of the last steps of each request, and what was learned.
    """

    name: ClassVar[str] = METHOD
    Options: ClassVar[type[BaseModel]] = TrieUnionOptions

    def __init__(self, options: TrieUnionOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.parts: list[Drafter] = [
            registry.get_drafter_class(name)(
                registry.parse_options(name, options.of_part(name)), context
            )
            for name in options.drafters
        ]
        # Of an instance, where other drafters have it of the class: it follows from the parts.
        self.needs_hidden_states = any(part.needs_hidden_states for part in self.parts)  # type: ignore[misc]
        self.needs_node_argmax = any(part.needs_node_argmax for part in self.parts)  # type: ignore[misc]
        self.calibrator = Calibrator()
        # What a part takes for a window is learned when it first drafts.
        is_costly = [part.needs_node_argmax for part in self.parts]
        self._usual_overhead = [context.num_nodes * 3 // 4 * costly for costly in is_costly]
        self.shared = SharedRecord(is_costly)
        self._states: dict[str, _State] = {}

    def load_model(self, target_model: Any) -> None:
        for part in self.parts:
            part.load_model(target_model)

    def release(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            state.roster.end()
        for part in self.parts:
            part.release(request_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        states = [self._updated_state(request) for request in requests]
        everybody = list(range(len(self.parts)))
        drafting = [
            state.roster.next_step() if self.options.adaptive else everybody for state in states
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
        """The request's state, after what its new tokens say about earlier drafts."""
        tokens = request.token_ids
        state = self._states.get(request.request_id)
        if state is None or not state.is_continued_by(tokens):
            state = self._states[request.request_id] = _State(self.shared)
        while state.drafts and len(tokens) - state.drafts[0].num_tokens >= HORIZON:
            draft = state.drafts.popleft()
            self._judge(state, draft, tokens[draft.num_tokens :][:HORIZON].tolist())
        state.tail = (len(tokens), tokens[-_TAIL:].tolist())
        return state

    def _judge(self, state: _State, draft: Draft, continuation: list[int]) -> None:
        merged = draft.merged
        right = {ROOT, *merged.true_path(continuation)}
        depth = {ROOT: 0}
        for node, parent in enumerate(merged.parents):
            if parent not in right:
                continue
            depth[node] = depth[parent] + 1
            if depth[node] <= len(continuation):
                self.calibrator.learn(merged.edges[node], len(draft.overhead), node in right)
        if self.options.adaptive:
            resting = {
                part: self._usual_overhead[part]
                for part in range(len(self.parts))
                if part not in draft.overhead
            }
            state.roster.record(judge(draft, continuation, resting))

    def _merged_tree(
        self, request: DraftRequest, state: _State, trees: dict[int, TokenTree]
    ) -> TokenTree:
        every = [trees.get(part, TokenTree.empty()) for part in range(len(self.parts))]
        merged = merge(every)
        probabilities: list[float] = []
        for node, parent in enumerate(merged.parents):
            above = 1.0 if parent < 0 else probabilities[parent]
            edge = self.calibrator.probability(merged.edges[node], len(trees))
            probabilities.append(above * edge)
        overhead = _overhead(trees, request.max_nodes)
        for part, nodes in overhead.items():
            if nodes:
                self._usual_overhead[part] = nodes
        draft = Draft(merged, probabilities, overhead, request.max_nodes, len(request.token_ids))
        state.drafts.append(draft)
        state.parts = trees
        state.union = build_tree(draft, every)
        if request.chain_only:
            state.union = state.union.as_chain()
        return state.union.tree


def _overhead(trees: dict[int, TokenTree], max_nodes: int) -> dict[int, int]:
    """Nodes for what each part never wants accepted; 0 for parts whose nodes do not fit together
    with those of the parts before."""
    overhead = {}
    for part, tree in trees.items():
        wanted = 0 if tree.never_accept is None else int(tree.never_accept.sum())
        overhead[part] = wanted if wanted <= max_nodes else 0
        max_nodes -= overhead[part]
    return overhead


def _part_request(request: DraftRequest, state: _State, part: int) -> DraftRequest:
    """The request as a part sees it: with what became of its own nodes."""
    # The parts' own probabilities are not those of the union, which a minimum is for.
    last_step = _part_step(request.last_step, state, part)
    return replace(request, last_step=last_step, min_probability=0.0)


def _part_step(step: VerifiedStep | None, state: _State, part: int) -> VerifiedStep | None:
    union, tree = state.union, state.parts.get(part)
    if step is None or union is None or tree is None or not union.was_scheduled_as(step.tree):
        return None
    # -1 stands for nodes that were not verified, because they did not fit.
    node_of = union.node_of[part]
    was_accepted = set(step.accepted)
    accepted = tuple(node for node, target in enumerate(node_of) if target in was_accepted)
    argmax = None
    if step.node_argmax is not None:
        known = step.node_argmax
        argmax = np.full(tree.num_nodes + 1, -1, dtype=np.int32)
        argmax[0] = known[0]
        for node, target in enumerate(node_of):
            if 0 <= target < len(known) - 1:
                argmax[node + 1] = known[target + 1]
    return VerifiedStep(tree, accepted, argmax)
