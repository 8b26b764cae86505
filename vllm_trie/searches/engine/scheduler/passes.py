"""A step of a search that has too few KV blocks, or tokens, for all hypotheses at once.

Hypotheses are a trie of tokens. The beams of one depth, the anchors, keep their KV during the step.
What lies behind them is computed for some hypotheses at a time, a pass, and given back::

    prompt --+-- anchor --+------ hypothesis 0  }
             |            +--+--- hypothesis 1  } first pass
             |               +--- hypothesis 2  }
             +-- anchor ----+---- hypothesis 3  } second pass
                            +---- hypothesis 4  }

Hypotheses meet a few tokens back. So anchors are a few tokens back, too, and the engine steps of a
step of the search do not depend on its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from vllm.utils.math_utils import cdiv

from vllm_trie.refusal import RefusedError

_NEAR = 8
"""Depths that are all tried as that of the anchors; of those before, every power of two."""


class Passes(NamedTuple):
    """The passes of a step of a search.

    Attributes:
        depth: Tokens of an anchor behind the prompt. That of the hypotheses if one pass computes
            all of them and no anchor is kept.
        rows: int64 [hypotheses] of each pass, in order.
    """

    depth: int
    rows: list[np.ndarray]


class Room(NamedTuple):
    """The resources that a search may use.

    Attributes:
        prompt_len: Tokens of its prompt.
        block_sizes: Tokens of a block, by KV cache group.
        num_blocks: Blocks of all groups together, those of the prompt included.
        num_beams: Beams of an engine step.
    """

    prompt_len: int
    block_sizes: Sequence[int]
    num_blocks: int
    num_beams: int


def cheapest_passes(generated: np.ndarray, num_computed: int, room: Room) -> Passes:
    """Return the passes that take the fewest engine steps.

    Args:
        generated: int64 [hypotheses, tokens], at least one of each.
        num_computed: Tokens behind the prompt whose KV all hypotheses have.
        room: Of the search.

    Raises:
        RefusedError: It is too little for one hypothesis.
    """
    length = generated.shape[1]
    # Of two that are equal, in diverse groups, each computes its last token itself.
    common = _common_tokens(generated[:, :-1]).tolist()
    best: Passes | None = None
    fewest = 0
    for depth in _depths(length, num_computed):
        rows = _passes(common, depth, length, num_computed, room)
        if rows is None:
            continue
        steps = max(0, depth - num_computed) + len(rows) * (length - depth)
        if best is None or steps < fewest:
            best, fewest = Passes(depth, rows), steps
    if best is None:
        raise RefusedError(
            f"a hypothesis of {length} tokens behind a prompt of {room.prompt_len} does not fit "
            f"into the {room.num_blocks} KV blocks that a search may have; lower max_tokens or "
            "give the engine more KV cache memory"
        )
    return best


def _depths(length: int, num_computed: int) -> Iterable[int]:
    """Return depths of anchors to try, the deepest first."""
    near = range(max(0, length - _NEAR), length + 1)
    powers = (length - (1 << i) for i in range(length.bit_length()))
    return sorted({0, num_computed, *near, *powers}, reverse=True)


def _passes(
    common: list[list[int]], depth: int, length: int, num_computed: int, room: Room
) -> list[np.ndarray] | None:
    """Return the passes behind anchors of a depth; None if there is too little room.

    Args:
        common: Tokens that two hypotheses have in common, behind the prompt and before their last.
        depth: Of the anchors.
        length: Of the hypotheses.
        num_computed: As in :func:`cheapest_passes`.
        room: Of the search.
    """
    most = [max(row[:i], default=-1) for i, row in enumerate(common)]
    num_anchors = sum(tokens < depth for tokens in most)
    if depth > num_computed and num_anchors > room.num_beams:
        return None
    free = room.num_blocks - sum(cdiv(room.prompt_len, size) for size in room.block_sizes)
    free -= sum(_num_blocks(tokens, 0, depth, room) for tokens in most)
    if depth == length:
        return [np.arange(len(common))] if free >= 0 and len(common) <= room.num_beams else None
    begins, used = [0], 0
    for row, tokens in enumerate(common):
        shared = max(tokens[begins[-1] : row], default=-1)
        needed = _num_blocks(shared, depth, length, room)
        if used + needed > free or row - begins[-1] == room.num_beams:
            if row == begins[-1]:
                return None
            begins.append(row)
            used, needed = 0, _num_blocks(-1, depth, length, room)
            if needed > free:
                return None
        used += needed
    return np.split(np.arange(len(common)), begins[1:])


def _num_blocks(common: int, begin: int, end: int, room: Room) -> int:
    """Return the blocks that one more hypothesis needs, from depth `begin` to `end`.

    Args:
        common: Most tokens behind the prompt that one before it has in common with it. If those
            are fewer than `begin`, it is the first behind its anchor, whose last block it takes.
        begin: Depth of the anchors, whose blocks exist.
        end: Depth to which it is computed.
        room: Of the search.
    """
    if common >= end:
        return 0
    total = 0
    for size in room.block_sizes:
        first = cdiv(room.prompt_len + begin, size)
        if common >= begin:
            first = (room.prompt_len + common) // size
        total += cdiv(room.prompt_len + end, size) - first
    return total


def _common_tokens(generated: np.ndarray) -> np.ndarray:
    """Return int64 [hypotheses, hypotheses], the tokens that they have in common."""
    num_rows, length = generated.shape
    differ = (generated != generated[0]).any(axis=0)
    begin = int(differ.argmax()) if differ.any() else length
    result = np.full((num_rows, num_rows), begin, dtype=np.int64)
    same = np.ones((num_rows, num_rows), dtype=bool)
    for token_ids in generated.T[begin:]:
        same &= token_ids[:, None] == token_ids
        result += same
    return result
