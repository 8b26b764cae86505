"""vLLM's CPU attention backend, with tree attention for requests with trees."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_trie.attention import AttentionKind, TreeBatch, choose_kernels, tree_attention
from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.attention.plain_requests import PlainRequests, plain_requests
from vllm_trie.drafts.engine.attention.tree_attention import TREE_ATTRIBUTE, TreeAttention
from vllm_trie.hooks.ledger.record import TREE_MASKS, Symbols
from vllm_trie.hooks.start.cpu_cache import is_readable

logger = logging.getLogger(f"vllm.{__name__}")

_PLAIN_ATTRIBUTE = "vllm_trie_plain_requests"
"""Attribute of the attention metadata that keeps its :class:`PlainRequests` for later layers."""


_CPU = "v1.attention.backends.cpu_attn:CPUAttentionBackend"
_backend = Symbols(f"{_CPU}.", TREE_MASKS, platform="cpu")
_impl = Symbols(f"{_CPU}Impl.", TREE_MASKS, platform="cpu")


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the stock metadata for a kernel whose cache layout tree attention reads.

    If this release's layout for AMX is another, the vector kernel takes the same shapes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config.read(self.vllm_config) is None:
            return
        if not is_readable(self.isa):
            logger.warning(
                "vLLM packs keys and values for %s otherwise than tree attention reads them: "
                "its slower vector kernel serves all requests",
                self.isa.upper(),
            )
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)


class TreeCPUAttentionImpl(TreeAttention, CPUAttentionBackendImpl):
    """Attention of one layer: the tree kernel serves the requests with trees, vLLM's all others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse({"a quantized KV cache": self.is_fp8_kv_cache})
        if config.read(get_current_vllm_config()) is not None:
            choose_kernels()  # fails here, at the start, if it cannot be loaded

    @_impl.overrides("gives rows with trees tree attention")
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
                plain = self._plain_requests(layer, query, attn_metadata, trees)
                setattr(attn_metadata, _PLAIN_ATTRIBUTE, plain)
            plain_output = plain.take(output)
            super().forward(
                layer,
                plain.take(query),
                key,
                value,
                kv_cache,
                plain.metadata,
                plain_output,
                *scales,
            )
            plain.put_back(plain_output, output)
        slopes: Any = self.alibi_slopes  # a tensor here, declared as the list that it was
        kind = AttentionKind(
            max(0, self.sliding_window),
            getattr(layer, "attention_chunk_size", None) or 0,
            self.logits_soft_cap,
            None if self.sinks is None else self.sinks.to(torch.float32),
            slopes,
        )
        block_table = attn_metadata.block_table
        tree_attention(query, kv_cache, block_table, trees, self.scale, output, kind, layer.isa)
        return output

    def _plain_requests(
        self, layer: Any, query: torch.Tensor, metadata: CPUAttentionMetadata, trees: TreeBatch
    ) -> PlainRequests:
        """Return the requests without trees; called once a step, for all layers."""
        plain = plain_requests(metadata, trees)
        plain.metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(plain.metadata.seq_lens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            seq_lens=plain.metadata.seq_lens,
            dtype=query.dtype,
            query_start_loc=plain.metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        return plain


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Registered over ``CPU_ATTN`` in processes that run tree speculation.

    A later engine without speculation in the same process gets stock behaviour.
    """

    @staticmethod
    @_backend.overrides("names the attention with trees")
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    @_backend.overrides("names the builder of its metadata")
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder


def choose_attention(for_trees: bool) -> None:
    """Replace vLLM's CPU attention by tree attention, or put it back.

    An engine that this process ran before may have left the other one in place.
    """
    if for_trees:
        register_backend(
            AttentionBackendEnum.CPU_ATTN, f"{__name__}.{TreeCPUAttentionBackend.__name__}"
        )
    else:
        AttentionBackendEnum.CPU_ATTN.clear_override()
