"""vLLM's CPU attention backend, with tree attention for the rows that have trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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

from vllm_trie.attention import TreeBatch, choose_kernels, tree_attention
from vllm_trie.attention.cpu_cache import SUPPORTED_ISAS
from vllm_trie.vllm_hooks import config
from vllm_trie.vllm_hooks.runner import TREE_ATTRIBUTE

_REST_ATTRIBUTE = "vllm_trie_rest"
"""Attribute of the attention metadata that keeps its :class:`RestOfBatch` for later layers."""


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the stock metadata, for kernels whose cache layout the plugin reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config.read(self.vllm_config) is None:
            return
        if self.isa == "amx":
            # Another cache layout; the vector kernel takes the same shapes.
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)
        if self.isa not in SUPPORTED_ISAS:
            raise ValueError(
                f"vLLM chose the CPU attention kernel {self.isa!r}, whose cache layout tree "
                f"attention does not read; it reads {' and '.join(SUPPORTED_ISAS)}. Run without "
                "vllm-trie's speculative methods on this CPU"
            )


@dataclass(frozen=True)
class RestOfBatch:
    """The requests of a step that have no tree, as a batch of their own for the stock kernel."""

    metadata: CPUAttentionMetadata
    rows: slice | torch.Tensor
    """Token rows of these requests: a slice where they are neighbours, else int64 indices."""


def rest_of_batch(
    metadata: CPUAttentionMetadata, trees: TreeBatch, scheduler_options: dict[str, Any]
) -> RestOfBatch:
    """Leave the requests with trees out of a step's metadata.

    Args:
        metadata: of the whole step, with one row per request.
        trees: the requests to leave out.
        scheduler_options: what vLLM's ``cpu_attn_get_scheduler_metadata`` wants to know beside the
            lengths.
    """
    starts = metadata.query_start_loc.numpy()
    others = np.ones(len(starts) - 1, dtype=bool)
    others[[row.batch_index for row in trees.rows]] = False
    indices = np.flatnonzero(others)
    lengths = (starts[1:] - starts[:-1])[indices]
    new_starts = np.zeros(len(indices) + 1, dtype=np.int32)
    np.cumsum(lengths, out=new_starts[1:])
    query_start_loc = torch.from_numpy(new_starts)
    chosen = torch.from_numpy(indices)
    seq_lens = metadata.seq_lens[chosen]
    if indices[-1] - indices[0] + 1 == len(indices):
        rows: slice | torch.Tensor = slice(int(starts[indices[0]]), int(starts[indices[-1] + 1]))
    else:
        offsets = np.repeat(starts[indices] - new_starts[:-1], lengths)
        rows = torch.from_numpy(offsets + np.arange(new_starts[-1], dtype=np.int64))
    rest = replace(
        metadata,
        num_actual_tokens=int(new_starts[-1]),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=metadata.block_table[chosen],
        scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(indices),
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            causal=metadata.causal,
            **scheduler_options,
        ),
    )
    return RestOfBatch(rest, rows)


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention of one layer."""

    attends_to_trees = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config.read(get_current_vllm_config()) is None:
            return
        unsupported = {
            "ALiBi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != -1,
            "attention sinks": self.sinks is not None,
            "a soft cap on the logits": bool(self.logits_soft_cap),
            "a quantized KV cache": self.is_fp8_kv_cache,
        }
        found = [name for name, present in unsupported.items() if present]
        if found:
            raise ValueError(
                f"the model's attention has {' and '.join(found)}, which tree attention does not "
                "support; run this model without vllm-trie's speculative methods"
            )
        choose_kernels()  # compiles at start-up, not in the first step

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
            rest = self._rest_of_batch(layer, query, attn_metadata, trees)
            own_output = output[rest.rows]
            super().forward(
                layer, query[rest.rows], key, value, kv_cache, rest.metadata, own_output, *scales
            )
            if not isinstance(rest.rows, slice):
                output[rest.rows] = own_output  # indexing made a copy
        tree_attention(query, kv_cache, attn_metadata.block_table, trees, self.scale, output)
        return output

    def _rest_of_batch(
        self, layer: Any, query: torch.Tensor, metadata: CPUAttentionMetadata, trees: TreeBatch
    ) -> RestOfBatch:
        rest = getattr(metadata, _REST_ATTRIBUTE, None)
        if rest is None:
            options = {
                "num_heads": self.num_heads,
                "num_kv_heads": self.num_kv_heads,
                "head_dim": self.head_size,
                "dtype": query.dtype,
                "sliding_window_size": -1,
                "isa": layer.isa,
                "enable_kv_split": envs.VLLM_CPU_ATTN_SPLIT_KV,
            }
            rest = rest_of_batch(metadata, trees, options)
            setattr(metadata, _REST_ATTRIBUTE, rest)
        return rest


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Registered over ``CPU_ATTN`` in processes that run tree speculation.

    A later engine without speculation in the same process gets stock behaviour from it.
    """

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder
