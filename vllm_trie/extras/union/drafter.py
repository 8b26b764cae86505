"""The method `trie_union`: candidates of several drafters in one tree.

A step: all parts draft, a trained drafter last, and parts that can draft again after the tokens of
its chain (grafts). `merge` puts all candidates into one trie, the `calibration` turns their
probabilities into one, and the likeliest nodes that fit become the tree. Once the text has gone on,
the draft teaches the calibration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafts import registry
from vllm_trie.drafts.drafter import Drafter, DrafterContext, DraftRequest
from vllm_trie.extras.union.calibration import Calibrator
from vllm_trie.extras.union.merge import Draft, Graft, build_tree, merge
from vllm_trie.extras.union.neural import NeuralDrafter, NeuralOptions
from vllm_trie.extras.union.options import METHOD, TrieUnionOptions
from vllm_trie.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from torch import nn

HORIZON = 20
"""Tokens that must follow a draft before it teaches the calibration; deeper nodes are ignored."""
_TAIL = 8  # tokens
_SHARE_OF_NODES = 4
"""A graft inside the chain has at most this fraction of the step's nodes; the one at its end, which
goes on where the chain stops, may have twice as many."""


class _State:
    """One request.

    Attributes:
        drafts: Those that the calibration has not learned from, at most `HORIZON`.
        tail: Length and last tokens of the text at the last call.
    """

    def __init__(self) -> None:
        self.drafts: deque[Draft] = deque()
        self.tail: tuple[int, list[int]] = (0, [])

    def is_continued_by(self, tokens: np.ndarray) -> bool:
        """Return whether these tokens extend those of the last call."""
        length, last = self.tail
        return length <= len(tokens) and tokens[max(0, length - _TAIL) : length].tolist() == last


class TrieUnionDrafter(Drafter):
    """Merges the trees of its parts and keeps the likeliest nodes that fit.

    The calibration learns from all candidates, including those that did not fit.

    State: that of the parts, each request's candidates of the last steps, calibration.

    Args:
        options, context: As for every drafter.
        parts: Drafters to use in place of those that the options name.

    Attributes:
        neural: The trained drafter among the parts, whose weights the engine loads.
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
        self.parts = list(parts or (made(given, context) for made, given in _classes(options)))
        self.neural = next((p for p in self.parts if isinstance(p, NeuralDrafter)), None)
        # Class attributes of other drafters; here they follow from the parts.
        self.needs_hidden_states = any(part.needs_hidden_states for part in self.parts)  # type: ignore[misc]
        self.needs_node_argmax = any(part.needs_node_argmax for part in self.parts)  # type: ignore[misc]
        self.needs_rows = any(part.needs_rows for part in self.parts)  # type: ignore[misc]
        self.calibrator = Calibrator()
        self._states: dict[str, _State] = {}

    @classmethod
    def check_files(
        cls, options: TrieUnionOptions, vocab_size: int, draft_model: str | None
    ) -> None:
        for part_class, part_options in _classes(options):
            part_class.check_files(part_options, vocab_size, draft_model)

    @classmethod
    def keeps_texts(cls, options: TrieUnionOptions) -> bool:
        return any(part_class.keeps_texts(of_part) for part_class, of_part in _classes(options))

    def load_model(self, target_model: nn.Module) -> None:
        for part in self.parts:
            part.load_model(target_model)

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        self._states.pop(request.request_id, None)
        for part in self.parts:
            part.released(request, output)

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:
        for part in self.parts:
            part.read_prompts(requests)

    def reset(self) -> None:
        for part in self.parts:
            part.reset()

    @property
    def part_names(self) -> Sequence[str]:
        return [part.name for part in self.parts]

    def parts_of(self, request_id: str, tree: TokenTree) -> list[int]:
        return self._states[request_id].drafts[-1].parts_of(tree)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        states = [self._updated_state(request) for request in requests]
        proposed: list[dict[int, TokenTree]] = [{} for _ in requests]
        # The minimum is for the union's probabilities, not for those of its parts.
        of_part = [replace(request, min_probability=0.0) for request in requests]
        for index, part in enumerate(self.parts):
            if part is not self.neural:
                for of_parts, tree in zip(proposed, part.propose([*of_part]), strict=True):
                    of_parts[index] = tree
        grafts = self._add_neural(requests, proposed)
        return [
            self._merged_tree(*of_request)
            for of_request in zip(requests, states, proposed, grafts, strict=True)
        ]

    def _add_neural(
        self, requests: Sequence[DraftRequest], proposed: Sequence[dict[int, TokenTree]]
    ) -> list[list[Graft]]:
        """Add the chains of the trained drafter, if there is one, to the trees of the other parts.

        Returns:
            For each request what other parts draft after the tokens of its chain.
        """
        grafts: list[list[Graft]] = [[] for _ in requests]
        if self.neural is None:
            return grafts
        chains = self.neural.propose(requests)
        for index, part in enumerate(self.parts):
            if part is self.neural:
                for of_parts, chain in zip(proposed, chains, strict=True):
                    of_parts[index] = chain
                continue
            for row, of_row in zip(grafts, _graft(part, index, requests, chains), strict=True):
                row += of_row
        return grafts

    def _updated_state(self, request: DraftRequest) -> _State:
        """Return the request's state, after learning from drafts that its new tokens continue."""
        tokens = request.token_ids
        state = self._states.get(request.request_id)
        if state is None or not state.is_continued_by(tokens):
            state = self._states[request.request_id] = _State()
        while state.drafts and len(tokens) - state.drafts[0].num_tokens >= HORIZON:
            draft = state.drafts.popleft()
            continuation = tokens[draft.num_tokens :][:HORIZON].tolist()
            self._calibrate(draft, continuation)
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
    ) -> TokenTree:
        merged = merge(trees, grafts)
        probabilities: list[float] = []
        for node, parent in enumerate(merged.parents):
            above = 1.0 if parent < 0 else probabilities[parent]
            edge = self.calibrator.probability(merged.edges[node], len(trees))
            probabilities.append(above * edge)
        num_tokens = len(request.token_ids)
        draft = Draft(merged, probabilities, [*trees], request.max_nodes, num_tokens)
        state.drafts.append(draft)
        return build_tree(draft, request.chain_only)


def _graft(
    part: Drafter, index: int, requests: Sequence[DraftRequest], trees: Sequence[TokenTree]
) -> list[list[Graft]]:
    """Return a part's candidates after each token of some chains, by request.

    Args:
        part: Asked once for all of them.
        index: Of the part.
        requests: As of the step.
        trees: Of the trained drafter, whose first branch is the chain.
    """
    grafts: list[list[Graft]] = [[] for _ in requests]
    asked, added, owners = [], [], []
    for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
        chain = tree.chain().token_list
        for length in range(1, len(chain) + 1):
            share = request.max_nodes // _SHARE_OF_NODES
            max_nodes = max(1, share if length < len(chain) else 2 * share)
            if length < request.max_depth:
                asked.append(replace(request, max_nodes=max_nodes, min_probability=0.0))
                added.append(chain[:length])
                owners.append(row)
    if asked:
        drafted = part.propose_after(asked, added)
        for row, path, tree in zip(owners, added, drafted, strict=True):
            if tree.num_nodes:
                grafts[row].append(Graft(index, path, tree))
    return grafts


def _classes(options: TrieUnionOptions) -> Iterator[tuple[type[Drafter], Any]]:
    """Yield class and options of each part; vLLM checks the files of a trained drafter."""
    for entry in options.drafters:
        if isinstance(entry, NeuralOptions):
            yield NeuralDrafter, entry
        else:
            part_options = registry.parse_options(entry, options.of_part(entry))
            yield registry.get_drafter_class(entry), part_options
