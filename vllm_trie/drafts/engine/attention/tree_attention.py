"""What tree attention adds to vLLM's attention on every device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
            setattr(metadata, TREE_ATTRIBUTE, trees)
