"""Options of the method `lookahead_trie`, and the shares of the node limit that they give."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from pydantic import Field, model_validator

from vllm_trie.drafts.drafter import DrafterOptions

DEFAULT_WINDOW_SIZE = 10


class LookaheadOptions(DrafterOptions):
    """Options of `lookahead_trie`."""

    window_size: int | None = Field(
        default=None,
        ge=1,
        le=128,
        description="W, columns of the window, which takes W*(L-1) - 1 nodes of the limit. Left "
        "out: 10, or as many as leave a quarter of the nodes to the candidates.",
    )
    ngram_size: int = Field(
        default=5,
        ge=3,
        le=16,
        description="L, length of the n-grams; a candidate has L-1 tokens.",
    )
    num_candidates: int = Field(
        default=5,
        ge=1,
        le=64,
        description="N, n-grams that are kept and verified for a first token.",
    )
    max_candidate_depth: int | None = Field(
        default=None,
        ge=1,
        le=15,
        description="D, depth limit of the candidates' trie, below ngram_size; left out: "
        "ngram_size - 1.",
    )
    max_candidate_nodes: int | None = Field(
        default=None,
        ge=1,
        description="B, node limit of the candidates' trie; left out: what the window leaves.",
    )
    min_probability: float = Field(
        default=0.05,
        ge=0.0,
        le=1.0,
        description="Candidates' nodes with a lower acceptance probability are not verified.",
    )
    pool_size: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="N-grams kept for a request, about 450 bytes each; those of the first token "
        "that has gone longest without a new one are dropped.",
    )
    pool_from_text: bool = Field(
        default=True,
        description="Keep n-grams of the prompt and the output, too.",
    )

    @model_validator(mode="after")
    def _check_depth(self) -> LookaheadOptions:
        if self.max_candidate_depth is not None and self.max_candidate_depth >= self.ngram_size:
            raise ValueError(
                f"max_candidate_depth={self.max_candidate_depth} must be smaller than "
                f"ngram_size={self.ngram_size}: a candidate has ngram_size - 1 tokens"
            )
        return self


class Shape(NamedTuple):
    """Sizes that hold for every request."""

    window_size: int
    ngram_size: int
    max_candidate_depth: int
    max_candidate_nodes: int


def window_nodes(window_size: int, ngram_size: int) -> int:
    """Return the largest number of nodes that a window ever has.

    Filled, it has L-1 levels of W tokens, less the last committed token, which is level 0 of the
    first column: W*(L-1) - 1 nodes. A window with few columns is larger while it fills.
    """
    sizes = []
    for num_levels in range(1, ngram_size):
        chain = window_size + ngram_size - 2 - num_levels
        sizes.append(chain + (num_levels - 1) * (chain + 1))
    return max(sizes)


def fit(options: LookaheadOptions, num_nodes: int) -> Shape:
    """Divide a limit of `num_nodes` nodes between window and candidates.

    Raises:
        ValueError: The window does not fit.
    """
    ngram_size = options.ngram_size
    depth = options.max_candidate_depth or ngram_size - 1
    largest_trie = options.max_candidate_nodes or options.num_candidates * depth
    window_size = options.window_size or _largest_window(ngram_size, largest_trie, num_nodes)
    taken = window_nodes(window_size, ngram_size)
    room = num_nodes - taken
    if room < 1:
        raise ValueError(
            f"window_size={window_size} with ngram_size={ngram_size} takes {taken} nodes, and "
            f"num_speculative_tokens={num_nodes} leaves none for candidates; set "
            f"num_speculative_tokens to {taken + 1} or more, a smaller window, or leave "
            "window_size out"
        )
    return Shape(window_size, ngram_size, depth, min(options.max_candidate_nodes or room, room))


def _largest_window(ngram_size: int, largest_trie: int, num_nodes: int) -> int:
    """Return the most columns that leave the candidates a quarter of the nodes."""

    def needed(size: int, limit: int) -> int:
        return window_nodes(size, ngram_size) + min(largest_trie, max(1, limit // 4))

    for size in range(DEFAULT_WINDOW_SIZE, 0, -1):
        if needed(size, num_nodes) <= num_nodes:
            return size
    smallest = next(n for n in itertools.count(num_nodes) if needed(1, n) <= n)
    raise ValueError(
        f"num_speculative_tokens={num_nodes} is too small for a lookahead window of "
        f"{ngram_size}-grams; set it to {smallest} or more, or set a smaller ngram_size"
    )
