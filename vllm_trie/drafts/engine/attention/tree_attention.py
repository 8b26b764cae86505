"""What tree attention adds to vLLM's attention on every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.config import get_current_vllm_config

from vllm_trie.attention import TreeBatch
from vllm_trie.drafts.engine import config

_Impl: Any = object  # vLLM's implementation is the next base class
TREE_ATTRIBUTE = "draft_trees"
"""Attribute of the attention metadata that takes the step's
:class:`~vllm_trie.attention.TreeBatch` to the attention backend."""


class TreeAttention(_Impl):
    """Attention of one layer, in front of vLLM's implementation for a device."""

    attends_to_trees = True

    def refuse(self, unsupported: Mapping[str, bool]) -> None:
        """Refuse a layer that an engine with tree speculation cannot run.

        Args:
            unsupported: By feature, whether the layer has it.

        Raises:
            ValueError: Naming the kinds that it has.
        """
        kinds = [name for name, present in unsupported.items() if present]
        if kinds and config.read(get_current_vllm_config()) is not None:
            raise ValueError(
                f"the model's attention has {' and '.join(kinds)}, which tree attention does not "
                "support; set verification='chain' for this model"
            )


def hand_on(trees: TreeBatch | None, by_layer: Mapping[str, object]) -> None:
    """Let the layers' metadata of a step carry its trees."""
    if trees is not None:
        for metadata in {id(m): m for m in by_layer.values()}.values():
            is_chunked = hasattr(metadata, "make_virtual_batches_block_table")
            setattr(metadata, TREE_ATTRIBUTE, in_chunks(trees, metadata) if is_chunked else trees)


def take_back(by_layer: Mapping[str, object]) -> None:
    """Let the layers' metadata carry no trees any more."""
    for metadata in by_layer.values():
        setattr(metadata, TREE_ATTRIBUTE, None)


def in_chunks(trees: TreeBatch, metadata: Any) -> TreeBatch:
    """Return a step's trees as rows of the metadata of layers that attend in chunks (Llama 4).

    vLLM makes a request of each chunk that a request's query tokens lie in. Together these have the
    blocks from the first chunk on, and their rows of the block table follow one another::

        request  tokens 0 ... 63 | chunk 64 ... 95 | chunk 96 ... 127 | 128 ... 140
        queries                             80 ...                      ... 140
        rows                       v                v + 1              v + 2
        table                      blocks of 64..95, of 96..127, of 128..

    So a tree's row begins at v, with all blocks of the three rows and the slots from 64 on.
    """
    starts = metadata.query_start_loc.numpy()
    lengths = np.concatenate([[0], np.cumsum(metadata.seq_lens.numpy())])
    rows = trees.row_array.copy()
    rows[:, 0] = np.searchsorted(starts, rows[:, 1], side="right") - 1
    ends = np.searchsorted(starts, rows[:, 1] + rows[:, 2])
    rows[:, 4] = lengths[ends] - lengths[rows[:, 0]]
    return replace(trees, row_array=rows)
