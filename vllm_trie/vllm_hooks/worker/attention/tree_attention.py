"""What tree attention adds to vLLM's attention, whatever the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config

from vllm_trie.attention import TreeBatch
from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.worker.attention.rest_of_batch import RestOfBatch
from vllm_trie.vllm_hooks.worker.verification.pending_tree import TREE_ATTRIBUTE

_REST_ATTRIBUTE = "vllm_trie_rest"
"""Attribute of the attention metadata that keeps its :class:`RestOfBatch` for later layers."""


class TreeAttention:
    """Attention of one layer, in front of vLLM's implementation for a device.

    The requests with trees are attended to by the device's tree kernel, all others by vLLM's own.
    """

    attends_to_trees = True

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        trees: TreeBatch | None = getattr(attn_metadata, TREE_ATTRIBUTE, None)
        scales = (output_scale, output_block_scale)
        if trees is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales
            )
        if not trees.covers_batch:
            rest = getattr(attn_metadata, _REST_ATTRIBUTE, None)
            if rest is None:
                rest = self.rest_of_batch(layer, query, attn_metadata, trees)
                setattr(attn_metadata, _REST_ATTRIBUTE, rest)
            own = rest.take(output)
            super().forward(
                layer, rest.take(query), key, value, kv_cache, rest.metadata, own, *scales
            )
            rest.put_back(own, output)
        self.attend_to_trees(query, kv_cache, attn_metadata, trees, output)
        return output

    def attend_to_trees(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        trees: TreeBatch,
        output: torch.Tensor,
    ) -> None:
        """Write the rows of ``output`` that belong to trees."""
        raise NotImplementedError

    def rest_of_batch(
        self, layer: Any, query: torch.Tensor, metadata: Any, trees: TreeBatch
    ) -> RestOfBatch:
        """The requests without trees; called once a step, the other layers take it over."""
        raise NotImplementedError

    def refuse(self, unsupported: Mapping[str, bool]) -> None:
        """Refuse a layer that an engine with tree speculation cannot run.

        Args:
            unsupported: whether the layer has what the name says.

        Raises:
            ValueError: naming what it has.
        """
        found = [name for name, present in unsupported.items() if present]
        if found and config.read(get_current_vllm_config()) is not None:
            raise ValueError(
                f"the model's attention has {' and '.join(found)}, which tree attention does not "
                "support; run this model without vllm-trie's speculative methods"
            )
