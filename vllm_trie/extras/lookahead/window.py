"""The lookahead window: W trajectories of Jacobi iteration, as a comb-shaped tree.

Level k of column i guesses the token at position `p + i + k`, where p is the position of the last
committed token, which is itself level 0 of column 0. Fu et al. 2024 ("Break the Sequential
Dependency of LLM Inference Using Lookahead Decoding", section 3 and figure 2b) let a window token
see the committed text, level 0 up to its own column and the lower levels of its column. That is the
path to the root of a tree in which level 0 is a chain and the higher levels hang under their
column's level 0:

    last token ── a1 ── a2 ── a3        level 0, columns 1 to W-1
        │         │     │     │
        b0        b1    b2    b3        level 1, columns 0 to W-1
        │         │     │     │
        c0        c1    c2    c3        level 2

The argmax after the highest level completes an n-gram of each column and becomes the new highest
level.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from vllm_trie.tree import TokenTree


class Window:
    """One request's window.

    The window fills by a level each step. It is wider meanwhile, because each step moves all levels
    by one position: it begins as level 0 alone with `window_size + ngram_size - 3` tokens.

    Args:
        first_level: Tokens to begin with, `start_size(window_size, ngram_size)` of them.
        ngram_size: L; a filled window has L - 1 levels.
    """

    def __init__(self, first_level: Sequence[int], ngram_size: int) -> None:
        self._num_levels = ngram_size - 1
        # levels[0] holds the columns from 1, the others those from 0.
        self._levels: list[list[int]] = [list(first_level)]

    @staticmethod
    def start_size(window_size: int, ngram_size: int) -> int:
        """Return the number of tokens of a new window."""
        return window_size + ngram_size - 3

    @property
    def is_filled(self) -> bool:
        return len(self._levels) == self._num_levels

    @property
    def token_ids(self) -> list[int]:
        """The nodes' tokens, level by level."""
        return [token for level in self._levels for token in level]

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self._levels))

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self._levels[0]) + len(self._levels) - 1

    @property
    def highest_level(self) -> slice:
        """The nodes of the window whose argmax `advance` takes."""
        return slice(self.num_nodes - len(self._levels[-1]), self.num_nodes)

    def append_to(self, tree: TokenTree) -> TokenTree:
        """Return the tree and after it the window, whose nodes are never accepted."""
        size, num_nodes = tree.num_nodes, tree.num_nodes + self.num_nodes
        comb = _comb_parents(len(self._levels[0]), len(self._levels))
        probabilities = np.zeros(num_nodes, dtype=np.float32)
        if tree.probabilities is not None:
            probabilities[:size] = tree.probabilities
        never_accept = np.arange(num_nodes) >= size
        if tree.never_accept is not None:
            never_accept[:size] = tree.never_accept
        return TokenTree(
            np.concatenate([tree.token_ids, np.array(self.token_ids, dtype=np.int32)]),
            np.concatenate([tree.parents, np.where(comb < 0, comb, comb + np.int32(size))]),
            probabilities,
            never_accept,
        )

    def advance(self, last_token: int, argmax: Sequence[int]) -> list[tuple[int, ...]]:
        """Move the window by one position.

        Args:
            last_token: The committed token that the window was verified after.
            argmax: The target's token after each node of the highest level.

        Returns:
            The columns' n-grams, none while the window fills.
        """
        levels = self._levels
        if not self.is_filled:
            # Level 0 has no column 0, so the argmax of column i becomes column i - 1's next level
            # there; above, the argmax of column 0 leaves the window with its column.
            new = list(argmax) if len(levels) == 1 else list(argmax)[1:]
            self._levels = [*(level[1:] for level in levels), new]
            return []
        ngrams = list(zip([last_token, *levels[0]], *levels[1:], argmax, strict=True))
        self._levels = [levels[1][1:], *levels[2:], list(argmax)]
        return ngrams


@functools.lru_cache(maxsize=256)
def _comb_parents(chain_length: int, num_levels: int) -> np.ndarray:
    """Return int32 parents of a chain, and of `num_levels - 1` levels below it and the root."""
    levels = [np.arange(-1, chain_length - 1, dtype=np.int32)]
    above = np.arange(-1, chain_length, dtype=np.int32)  # the root and the chain: level 0
    for level in range(1, num_levels):
        levels.append(above)
        start = chain_length + (level - 1) * (chain_length + 1)
        above = np.arange(start, start + chain_length + 1, dtype=np.int32)
    parents = np.concatenate(levels)
    parents.setflags(write=False)
    return parents
