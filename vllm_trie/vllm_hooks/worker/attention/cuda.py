"""vLLM's Triton attention backend, with tree attention for requests with trees.

These classes have not run on a GPU yet, only in Triton's interpreter; the kernels compile for
compute capabilities 7.5 to 12.0. :mod:`vllm_trie.vllm_hooks.setup.support` therefore refuses GPUs
unless the user allows them, and :mod:`vllm_trie.vllm_hooks.worker.gpu_check` checks results first.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_trie.attention import TreeBatch
from vllm_trie.attention.gpu_cache import move_rows_in_layers
from vllm_trie.attention.triton_kernel import (
    NUM_SPLITS,
    DeviceTrees,
    tree_attention_triton,
    trees_on_device,
)
from vllm_trie.vllm_hooks.worker.attention.plain_requests import PlainRequests, plain_requests
from vllm_trie.vllm_hooks.worker.attention.tree_attention import TreeAttention

_STARTS_ATTRIBUTE = "vllm_trie_starts"
"""Attribute of the metadata: a copy of its ``query_start_loc`` on the CPU."""
_DEVICE_TREES_ATTRIBUTE = "vllm_trie_device_trees"
"""Attribute of the metadata: the step's :class:`DeviceTrees`, the same for all layers."""
_MIN_SLOTS_PER_SPLIT = 256


class TreeTritonMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builds the stock metadata; keeps attention out of CUDA graphs.

    A graph that was captured without trees would replay without them. vLLM captures the model in
    pieces between the attention layers instead, as its default mode does for prefills.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        setattr(metadata, _STARTS_ATTRIBUTE, common_attn_metadata.query_start_loc_cpu.numpy())
        return metadata


class TreeTritonAttentionImpl(TreeAttention, TritonAttentionImpl):
    """Attention of one layer."""

    move_slots = staticmethod(move_rows_in_layers)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "ALiBi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != (-1, -1),
            "attention sinks": self.sinks is not None,
            "a soft cap on the logits": bool(self.logits_soft_cap),
            "a limit on the chunks it looks back to": self.chunk_lookback > -1,
            "a quantized KV cache": self.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            f"the type {self.attn_type!r}": self.attn_type != AttentionType.DECODER,
        }
        self.refuse(unsupported)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def attend_to_trees(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TritonAttentionMetadata,
        trees: TreeBatch,
        output: torch.Tensor,
    ) -> None:
        on_device: DeviceTrees | None = getattr(metadata, _DEVICE_TREES_ATTRIBUTE, None)
        if on_device is None:
            on_device = trees_on_device(trees, self.num_queries_per_kv, query.device)
            setattr(metadata, _DEVICE_TREES_ATTRIBUTE, on_device)
        programs = len(on_device.blocks) * self.num_kv_heads
        longest = max(row.seq_len for row in trees.rows)
        tree_attention_triton(
            query,
            kv_cache,
            metadata.block_table,
            on_device,
            self.scale,
            output,
            num_splits(programs, longest, _num_processors(query.device)),
        )

    def plain_requests(
        self, layer: Any, query: torch.Tensor, metadata: TritonAttentionMetadata, trees: TreeBatch
    ) -> PlainRequests:
        return plain_requests(metadata, trees, getattr(metadata, _STARTS_ATTRIBUTE, None))


def num_splits(programs: int, seq_len: int, num_processors: int) -> int:
    """Return the number of programs that share a request's slots, so that the device is full.

    Args:
        programs: number of programs of the kernel without splits.
        seq_len: KV slots of the longest request.
        num_processors: multiprocessors of the device; each runs about two programs.
    """
    wanted = min(2 * num_processors // programs, seq_len // _MIN_SLOTS_PER_SPLIT)
    return max((count for count in NUM_SPLITS if count <= wanted), default=1)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """Registered as ``CUSTOM`` by the GPU worker of tree speculation."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonMetadataBuilder]:
        return TreeTritonMetadataBuilder

    # The first two put fields of each request into the metadata that plain_requests() does not
    # split; the third fixes an order of sums, which splits change.

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False
