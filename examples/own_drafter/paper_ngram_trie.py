"""The drafter of "Faster In-Context Learning for LLMs via N-Gram Trie Speculative Decoding".

Its Algorithm 1 merges all windows of n tokens of a prompt into a trie whose nodes count how often
their path occurs. A draft looks up the last L_p tokens of the text, or fewer where they did not
occur, and takes the most frequent nodes below, down to n - L_p tokens. The output is not indexed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from pydantic import Field, model_validator

from vllm_trie.drafters import Drafter, DrafterOptions, DraftRequest
from vllm_trie.tree import ROOT, TokenTree, depth_first_layout


@dataclass(slots=True)
class Node:
    """A path from the root: how often its tokens occur in a row, and what follows them."""

    frequency: int = 0
    children: dict[int, Node] = field(default_factory=dict)


def build_trie(tokens: Sequence[int], ngram_size: int) -> Node:
    """Return the trie of all windows of `ngram_size` tokens, those cut off by the end included."""
    root = Node()
    for start in range(len(tokens)):
        node = root
        for token in tokens[start : start + ngram_size]:
            node = node.children.setdefault(token, Node())
            node.frequency += 1
    return root


def longest_match(root: Node, suffix: Sequence[int]) -> Node | None:
    """Return the node of the longest end of `suffix` that something follows; None without one."""
    for start in range(len(suffix)):
        node: Node | None = root
        for token in suffix[start:]:
            node = node and node.children.get(token)
        if node is not None and node.children:
            return node
    return None


def most_frequent(match: Node, max_depth: int, chain_only: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (token, parent, frequency) of the nodes below a match, the most frequent first.

    A parent is at least as frequent as its child and comes before it. Ties go to the node that the
    text has first. `parent` counts what was yielded; -1 is the match.
    """
    order = count()
    heap: list[tuple[int, int, int, int, int, Node]] = []

    def push_children(node: Node, parent: int, depth: int) -> None:
        for token, child in node.children.items():
            heapq.heappush(heap, (-child.frequency, next(order), token, parent, depth, child))

    push_children(match, ROOT, 1)
    for number in count():
        if not heap:
            return
        negative, _, token, parent, depth, node = heapq.heappop(heap)
        yield token, parent, -negative
        if chain_only:
            heap.clear()
        if depth < max_depth:
            push_children(node, number, depth + 1)


class Options(DrafterOptions):
    """The paper's parameters; its `num_draft` is `num_speculative_tokens`."""

    ngram_size: int = Field(default=13, ge=2, description="The window n.")
    max_prefix_len: int = Field(
        default=3, ge=1, description="L_p, the longest suffix of the text that is looked up."
    )

    @model_validator(mode="after")
    def _check_window(self) -> Options:
        if self.max_prefix_len >= self.ngram_size:
            raise ValueError(
                f"max_prefix_len={self.max_prefix_len} must be smaller than "
                f"ngram_size={self.ngram_size}: a window holds a matched prefix and a draft"
            )
        return self


class PaperDrafter(Drafter):
    """Drafts from a trie of each request's prompt."""

    name = "paper_ngram_trie"
    Options = Options

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._tries: dict[str, tuple[list[int], Node]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._draft(request) for request in requests]

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        self._tries.pop(request.request_id, None)

    def _draft(self, request: DraftRequest) -> TokenTree:
        size, prefix_len = self.options.ngram_size, self.options.max_prefix_len
        match = longest_match(self._trie_of(request), request.token_ids[-prefix_len:].tolist())
        if match is None:
            return TokenTree.empty()
        depth = min(size - prefix_len, request.max_depth)
        drafts = most_frequent(match, depth, request.chain_only)
        chosen = [draft for _, draft in zip(range(request.max_nodes), drafts, strict=False)]
        tokens, parents, frequencies = zip(*chosen, strict=True)
        total = sum(child.frequency for child in match.children.values())
        tree = TokenTree.from_lists(tokens, parents, [count / total for count in frequencies])
        return depth_first_layout(tree)

    def _trie_of(self, request: DraftRequest) -> Node:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        indexed, trie = self._tries.get(request.request_id, ([], Node()))
        if indexed != prompt:
            trie = build_trie(prompt, self.options.ngram_size)
            self._tries[request.request_id] = prompt, trie
        return trie
