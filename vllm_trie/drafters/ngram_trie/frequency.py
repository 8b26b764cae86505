"""The n-gram-trie paper's index and node choice, in readable Python.

Source: "Faster In-Context Learning for LLMs via N-Gram Trie Speculative Decoding".
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from vllm_trie.tree import ROOT, TokenTree


class TrieNode:
    """A node of the index: how often its path occurred, and what followed."""

    __slots__ = ("children", "frequency")

    def __init__(self) -> None:
        self.frequency = 0
        self.children: dict[int, TrieNode] = {}


class FrequencyTrie:
    """All windows of up to `ngram_size` tokens of a growing text, merged into one trie.

    Every sub-prefix of every window is a path from the root, so `frequency` of the node at the end
    of a path is the number of times that its tokens occurred in a row. The windows that are still
    open at the end of the text are in the trie too, and grow with it.
    """

    def __init__(self, ngram_size: int) -> None:
        self.ngram_size = ngram_size
        self.num_tokens = 0
        self._root = TrieNode()
        # Ends of the windows that can still grow, longest first.
        self._open: list[TrieNode] = []

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the end of the text; O(ngram_size) a token."""
        for token in token_ids:
            grown = []
            for end in [*self._open, self._root]:
                child = end.children.get(token)
                if child is None:
                    child = end.children[token] = TrieNode()
                child.frequency += 1
                grown.append(child)
            self._open = grown[-(self.ngram_size - 1) :]
        self.num_tokens += len(token_ids)

    def find(self, path: Sequence[int]) -> TrieNode | None:
        """The node at the end of a path, None if these tokens never occurred in a row."""
        node: TrieNode | None = self._root
        for token in path:
            if node is None:
                return None
            node = node.children.get(token)
        return node

    def draft(
        self, suffix: Sequence[int], max_nodes: int, max_depth: int, chain_only: bool
    ) -> TokenTree:
        """The most frequent continuations of the longest known part of `suffix`.

        Args:
            suffix: the last tokens of the text, at most `max_prefix_len` of them.
            max_nodes: number of nodes to choose (`num_draft`).
            max_depth: deepest node allowed.
            chain_only: follow only the most frequent continuation.

        Returns:
            The `max_nodes` most frequent nodes below the match. A parent is at least as frequent as
            its child, so the parents of a chosen node are always chosen. Ties go to the node found
            first. The probability of a node is its frequency over that of the match.
        """
        for start in range(len(suffix)):
            match = self.find(suffix[start:])
            if match is not None and match.children:
                return _most_frequent(match, max_nodes, max_depth, chain_only)
        return TokenTree.empty()


def _most_frequent(match: TrieNode, max_nodes: int, max_depth: int, chain_only: bool) -> TokenTree:
    total = sum(child.frequency for child in match.children.values())
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    # (-frequency, order of discovery, token, trie node, parent, depth)
    heap: list[tuple[int, int, int, TrieNode, int, int]] = []
    discovered = 0

    def discover(node: TrieNode, parent: int, depth: int) -> None:
        nonlocal discovered
        for token, child in node.children.items():
            heapq.heappush(heap, (-child.frequency, discovered, token, child, parent, depth))
            discovered += 1

    discover(match, ROOT, 1)
    while heap and len(token_ids) < max_nodes:
        negative, _, token, node, parent, depth = heapq.heappop(heap)
        token_ids.append(token)
        parents.append(parent)
        probabilities.append(-negative / total)
        if chain_only:
            heap.clear()
        if depth < max_depth:
            discover(node, len(token_ids) - 1, depth + 1)
    return TokenTree.from_lists(token_ids, parents, probabilities)
