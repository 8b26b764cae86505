"""What tree attention adds to vLLM's attention on every device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config

from vllm_trie.attention import TreeBatch
from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.worker.attention.plain_requests import PlainRequests

_Impl: Any = object  # vLLM's implementation is the next base class
TREE_ATTRIBUTE = "draft_trees"
"""Attribute of the attention metadata that carries the step's
:class:`~vllm_trie.attention.TreeBatch` to the attention backend; a field on a patched vLLM."""
_PLAIN_ATTRIBUTE = "vllm_trie_plain_requests"
"""Attribute of the attention metadata that keeps its :class:`PlainRequests` for later layers."""


class TreeAttention(_Impl):
    """Attention of one layer, in front of vLLM's implementation for a device.

    The device's tree kernel serves the requests with trees, vLLM's own kernel all others.
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
            attended: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales
            )
            return attended
        if not trees.covers_batch:
            plain = getattr(attn_metadata, _PLAIN_ATTRIBUTE, None)
            if plain is None:
                plain = self.plain_requests(layer, query, attn_metadata, trees)
                setattr(attn_metadata, _PLAIN_ATTRIBUTE, plain)
            own = plain.take(output)
            super().forward(
                layer, plain.take(query), key, value, kv_cache, plain.metadata, own, *scales
            )
            plain.put_back(own, output)
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
        """Write the part of ``output`` that belongs to requests with trees."""
        raise NotImplementedError

    def plain_requests(
        self, layer: Any, query: torch.Tensor, metadata: Any, trees: TreeBatch
    ) -> PlainRequests:
        """Return the requests without trees; called once a step, for all layers."""
        raise NotImplementedError

    def refuse(self, unsupported: Mapping[str, bool]) -> None:
        """Refuse a layer that an engine with tree speculation cannot run.

        Args:
            unsupported: by feature, whether the layer has it.

        Raises:
            ValueError: naming the features that it has.
        """
        found = [name for name, present in unsupported.items() if present]
        if found and config.read(get_current_vllm_config()) is not None:
            raise ValueError(
                f"the model's attention has {' and '.join(found)}, which tree attention does not "
                "support; set verification='chain' for this model"
            )
