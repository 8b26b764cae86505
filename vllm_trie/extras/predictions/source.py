"""Drafts from a text that the client predicts as the answer of one request.

A prediction is drafted next to what the request's drafter proposes, whichever that is. At the
beginning of the output it is the answer; after a difference the position in it is found again by
the longest match behind it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.drafts.sources import DraftSource
from vllm_trie.tree import ROOT, TokenTree, depth_first_layout

if TYPE_CHECKING:
    from vllm_trie.drafts.engine.tree_step import TreeStep
    from vllm_trie.hooks.wire import TreeStats

PREDICTION = "prediction"
"""Key of a request's extra arguments: the answer as the client predicts it; behind the front end
the bytes of int32 token ids."""
LONGEST_MATCH = 32
"""Tokens behind a position that are compared."""
NEAR = 64
"""Tokens around the last position within which a shorter match is believed more."""
NEAR_LEAD = 2.5
"""Tokens by which a match elsewhere must be longer than one there."""
MOST_POSITIONS = 256
"""Positions that are compared, those around the last one: the work of a step is bounded."""
_NOWHERE = -1
_EDGES = (1, 2, 3, 4, 8, 16)
"""Match lengths from which a class of the acceptance rates begins; the first is below them."""
_RATES = (0.3, 0.5, 0.65, 0.75, 0.85, 0.93, 0.98)
"""Acceptance rates that each request's classes start from."""
_AT_BEGINNING = 8
"""The beginning of the output counts as a match of this length."""
_PRIOR = 2.0
"""Tokens that they count for."""
_DECAY = 0.97
"""Each token of a class multiplies the class's counts by this."""
_LEAST = 0.1
"""Probability of a path below which nothing is drafted."""


class PredictionCounts(NamedTuple):
    """Tokens drafted from a prediction, under the names of their metrics."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@dataclass(slots=True)
class _Prediction:
    """The prediction of one request.

    The acceptance rates are learned from the text, whether it was drafted or not.

    Attributes:
        tokens: int32, all of it.
        position: Index in `tokens` of the token that is expected next, or was expected last.
        match: Tokens behind it that output and prediction share; `_NOWHERE` while no token is
            expected.
        num_output: Output tokens that were taken in.
        drafted: The tokens drafted last.
        expected, right: Decaying counts of tokens, by class of match length.
    """

    tokens: np.ndarray
    position: int = 0
    match: int = _AT_BEGINNING
    num_output: int = 0
    drafted: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=lambda: [_PRIOR] * len(_RATES))
    right: list[float] = field(default_factory=lambda: [_PRIOR * rate for rate in _RATES])

    def take(self, output: np.ndarray) -> None:
        """Take in the output so far, int32."""
        if len(output) < self.num_output:  # it starts again
            self.position, self.match, self.num_output = 0, _AT_BEGINNING, 0
        new = output[self.num_output :]
        self.num_output = len(output)
        if not len(new):
            return
        if self.match != _NOWHERE:
            expected = self.tokens[self.position : self.position + len(new)]
            differs = np.flatnonzero(expected != new[: len(expected)])
            num_equal = int(differs[0]) if len(differs) else len(expected)
            for depth in range(min(num_equal + 1, len(expected))):
                kind = bisect.bisect(_EDGES, self.match + depth)
                self.expected[kind] = _DECAY * self.expected[kind] + 1.0
                self.right[kind] = _DECAY * self.right[kind] + (depth < num_equal)
            self.position += num_equal
            self.match += num_equal
            if num_equal == len(new):
                return
            if num_equal == len(new) - 1:  # perhaps another token instead of this one
                self.position += 1
                self.match = 0
            else:
                self.match = _NOWHERE
        self._find(output)

    def _find(self, output: np.ndarray) -> None:
        """Find the position again: the longest match of the output's end, of equals the nearest."""
        ends = np.flatnonzero(self.tokens == output[-1])
        start = max(int(ends.searchsorted(self.position)) - MOST_POSITIONS // 2, 0)
        positions = ends[start : start + MOST_POSITIONS] + 1
        if not len(positions):
            return
        matches = _match_lengths(self.tokens, positions, output)
        distances = np.abs(positions - self.position)
        scores = matches + NEAR_LEAD * (distances <= NEAR)
        best = np.lexsort((distances, -scores))[0]
        self.position, self.match = int(positions[best]), int(matches[best])

    def draft(self, length: int, least: float) -> list[float]:
        """Draft at most `length` tokens; return their probabilities, of the path to each, which are
        at least `least`."""
        probabilities: list[float] = []
        probability = 1.0
        room = 0 if self.match == _NOWHERE else min(length, len(self.tokens) - self.position)
        for depth in range(room):
            kind = bisect.bisect(_EDGES, self.match + depth)
            probability *= self.right[kind] / self.expected[kind]
            if probability < max(least, _LEAST):
                break
            probabilities.append(probability)
        self.drafted = self.tokens[self.position : self.position + len(probabilities)].tolist()
        return probabilities

    def observe(self, tree: TokenTree, accepted: Sequence[int]) -> PredictionCounts:
        """Count the nodes of a verified tree that are the draft's, and forget the draft."""
        path = tree.path_of(self.drafted)
        num_accepted = len(set(path).intersection(accepted))
        self.drafted = []
        return PredictionCounts(num_accepted, len(path) - num_accepted)


class Predictions(DraftSource, StepObserver):
    """The predictions of the running requests."""

    def __init__(self) -> None:
        self._predictions: dict[str, _Prediction] = {}

    def may_extend(self, request: DraftRequest) -> bool:
        return isinstance(request.extra_args.get(PREDICTION), bytes)  # checked by the front end

    def extend(self, requests: Sequence[DraftRequest], trees: list[TokenTree]) -> list[TokenTree]:
        """Return the drafter's trees, with the predictions of the requests that have one."""
        if not any(map(self.may_extend, requests)):
            return trees
        extended = list(trees)
        for index, request in enumerate(requests):
            if self.may_extend(request):
                packed = request.extra_args[PREDICTION]
                extended[index] = self._extended(request, packed, trees[index])
        return extended

    def _extended(self, request: DraftRequest, packed: bytes, tree: TokenTree) -> TokenTree:
        prediction = self._predictions.get(request.request_id)
        if prediction is None:
            prediction = _Prediction(np.frombuffer(packed, dtype=np.int32))
            self._predictions[request.request_id] = prediction
        prediction.take(request.token_ids[request.num_prompt_tokens :])
        length = min(request.max_nodes, request.max_depth)
        probabilities = prediction.draft(length, request.min_probability)
        if not probabilities:
            return tree
        if tree.never_accept is not None:  # a window, which needs its nodes to itself
            tree = TokenTree.empty()
        return merge_chain(tree, prediction.drafted, probabilities, request.max_nodes)

    def ended(self, step: TreeStep, new_tokens: Sequence[Sequence[int]], stats: TreeStats) -> None:
        """Count the verified nodes that were drafted from predictions."""
        if not self._predictions:
            return
        for request_id, tree, path in zip(step.request_ids, step.trees, step.accepted, strict=True):
            prediction = self._predictions.get(request_id)
            if prediction is not None and prediction.drafted:
                stats.count(request_id, prediction.observe(tree, path)._asdict())

    def released(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._predictions.pop(request_id, None)


def merge_chain(
    tree: TokenTree, tokens: Sequence[int], probabilities: Sequence[float], max_nodes: int
) -> TokenTree:
    """Return the likeliest nodes of a drafter's tree and a predicted chain, depth-first.

    At each node of the chain the prediction claims its part of the probability for its next token
    and leaves the rest to the drafter.

    Args:
        tree: The drafter's. Without probabilities its nodes come behind the chain.
        tokens, probabilities: Of the chain, the latter of the path to each of its nodes.
        max_nodes: Of the result.
    """
    chain = [1.0, *probabilities]
    claims = [p / above for above, p in pairwise(chain)]
    merged_tokens, parents = list(tokens), list(range(-1, len(tokens) - 1))
    edges = claims.copy()
    of_drafter = [0.0] * tree.num_nodes
    if tree.probabilities is not None:
        of_drafter = tree.probabilities.tolist()
    nodes: list[int] = []  # of the result, for each of the tree; those of the chain come first
    for node, (token, parent) in enumerate(zip(tree.token_list, tree.parent_list, strict=True)):
        above = ROOT if parent == ROOT else nodes[parent]
        before = 1.0 if parent == ROOT else of_drafter[parent]
        edge = of_drafter[node] / before if before > 0.0 else 0.0
        is_below_chain = above + 1 < len(tokens)
        if is_below_chain:
            edge *= 1.0 - claims[above + 1]
        if is_below_chain and tokens[above + 1] == token:
            edges[above + 1] += edge
            nodes.append(above + 1)
            continue
        nodes.append(len(merged_tokens))
        merged_tokens.append(token)
        parents.append(above)
        edges.append(edge)
    paths: list[float] = []
    for edge, parent in zip(edges, parents, strict=True):
        paths.append(min(edge, 1.0) * (1.0 if parent == ROOT else paths[parent]))
    order = sorted(range(len(paths)), key=lambda node: -paths[node])[:max_nodes]
    index = {node: rank for rank, node in enumerate(order)}
    likeliest = TokenTree.from_lists(
        [merged_tokens[node] for node in order],
        [index.get(parents[node], ROOT) for node in order],
        [paths[node] for node in order],
    )
    return depth_first_layout(likeliest)


def _match_lengths(tokens: np.ndarray, positions: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Return how many tokens before each position match the output's end, at most `LONGEST_MATCH`.

    Args:
        tokens: int32, the prediction.
        positions: int64 [positions], at least 1.
        output: int32.
    """
    end = output[: -1 - LONGEST_MATCH : -1]
    indices = positions[:, None] - np.arange(1, len(end) + 1)
    equal = (tokens.take(indices, mode="clip") == end) & (indices >= 0)
    return np.where(equal.all(axis=1), len(end), equal.argmin(axis=1))
