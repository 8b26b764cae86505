"""The n-gram-trie paper's drafter, as the reference in benchmarks.

Source: "Faster In-Context Learning for LLMs via N-Gram Trie Speculative Decoding".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field, model_validator

from tests.oracles.ngrams.best_first import BestFirstTree
from vllm_trie.drafters import Drafter, DrafterOptions, DraftRequest, register
from vllm_trie.tree import ROOT, TokenTree


class TrieNode:
    """A node of the index: the number of times its path occurred, and what followed."""

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
        self._tokens = np.empty(0, dtype=np.int32)
        self._root = TrieNode()
        # Ends of the windows that can still grow, longest first.
        self._open: list[TrieNode] = []

    def synchronize(self, token_ids: np.ndarray) -> None:
        """Make these tokens the text: append what is new, or begin anew where they do not continue
        the text."""
        length = len(self._tokens)
        if not np.array_equal(token_ids[:length], self._tokens):
            length, self._root, self._open = 0, TrieNode(), []
        self.append(token_ids[length:].tolist())
        self._tokens = token_ids.copy()

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

    def find(self, path: Sequence[int]) -> TrieNode | None:
        """Return the node at the end of a path, None if its tokens never occurred in a row."""
        node: TrieNode | None = self._root
        for token in path:
            if node is None:
                return None
            node = node.children.get(token)
        return node

    def draft(
        self, suffix: Sequence[int], max_nodes: int, max_depth: int, chain_only: bool
    ) -> TokenTree:
        """Return the most frequent continuations of the longest known part of `suffix`.

        Args:
            suffix: The last tokens of the text, at most `max_prefix_len` of them.
            max_nodes: Number of nodes to choose (the paper's `num_draft`).

        Returns:
            The `max_nodes` most frequent nodes below the match, depth-first. A parent is at least
            as frequent as its child, so the parents of a chosen node are always chosen. Ties go to
            the node found first. The probability of a node is its frequency over that of the match.
        """
        tree = BestFirstTree(max_nodes, max_depth, chain_only)
        for start in range(len(suffix)):
            match = self.find(suffix[start:])
            if match is not None and match.children:
                _grow(tree, match)
                break
        return tree.lay_out()


def _grow(tree: BestFirstTree, match: TrieNode) -> None:
    total = sum(child.frequency for child in match.children.values())
    nodes = {ROOT: match}  # by number of the chosen guess

    def expand(parent: int, depth: int) -> None:
        for token, child in nodes[parent].children.items():
            tree.discover(child.frequency / total, token, parent, depth)

    expand(ROOT, 1)
    while guess := tree.choose():
        if tree.may_grow():
            number = len(tree.chosen) - 1
            nodes[number] = nodes[guess.parent].children[guess.token]
            expand(number, guess.depth + 1)


class PaperOptions(DrafterOptions):
    """The paper's parameters, and whether the output is indexed."""

    ngram_size: int = Field(default=13, ge=2, description="The window n.")
    max_prefix_len: int = Field(
        default=3, ge=1, description="L_p, the longest suffix of the text that is looked up."
    )
    index_output: bool = Field(default=True, description="False: the prompt alone, as in it.")

    @model_validator(mode="after")
    def _check_window(self) -> PaperOptions:
        if self.max_prefix_len >= self.ngram_size:
            raise ValueError(
                f"max_prefix_len={self.max_prefix_len} must be smaller than "
                f"ngram_size={self.ngram_size}: a window holds a matched prefix and a guess"
            )
        return self


class PaperDrafter(Drafter):
    """Drafts from a trie of each request's own text."""

    name = "ngram_trie_paper"
    Options = PaperOptions

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._tries: dict[str, FrequencyTrie] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def release(self, request_id: str) -> None:
        self._tries.pop(request_id, None)

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        options, tokens = self.options, request.token_ids
        trie = self._tries.setdefault(request.request_id, FrequencyTrie(options.ngram_size))
        trie.synchronize(tokens if options.index_output else tokens[: request.num_prompt_tokens])
        suffix = tokens[-options.max_prefix_len :].tolist()
        return trie.draft(suffix, request.max_nodes, request.max_depth, request.chain_only)


register(PaperDrafter)
