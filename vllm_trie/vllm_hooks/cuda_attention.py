"""vLLM's Triton attention backend, with tree attention for the rows that have trees.

Not yet run on a GPU: the kernel is tested in Triton's interpreter and compiles for sm_90.
:mod:`vllm_trie.vllm_hooks.support` therefore refuses GPUs at start-up.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_trie.attention import TreeBatch
from vllm_trie.attention.triton_kernel import DeviceTrees, tree_attention_triton, trees_on_device
from vllm_trie.vllm_hooks import config
from vllm_trie.vllm_hooks.rest_of_batch import RestOfBatch, rest_of_batch
from vllm_trie.vllm_hooks.runner import TREE_ATTRIBUTE

_REST_ATTRIBUTE = "vllm_trie_rest"
_DEVICE_TREES_ATTRIBUTE = "vllm_trie_device_trees"
_MAX_SPLITS = 16
_MIN_SLOTS_PER_SPLIT = 256


class TreeTritonMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builds the stock metadata; keeps attention out of CUDA graphs.

    A graph captured without trees would replay without them.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class TreeTritonAttentionImpl(TritonAttentionImpl):
    """Attention of one layer."""

    attends_to_trees = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config.read(get_current_vllm_config()) is None:
            return
        unsupported = {
            "ALiBi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != (-1, -1),
            "attention sinks": self.sinks is not None,
            "a soft cap on the logits": bool(self.logits_soft_cap),
            "a quantized KV cache": self.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
        }
        found = [name for name, present in unsupported.items() if present]
        if found:
            raise ValueError(
                f"the model's attention has {' and '.join(found)}, which tree attention does not "
                "support; run this model without vllm-trie's speculative methods"
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

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
            rest = _rest(attn_metadata, trees)
            own = rest.take(output)
            super().forward(
                layer, rest.take(query), key, value, kv_cache, rest.metadata, own, *scales
            )
            rest.put_back(own, output)
        on_device = _device_trees(attn_metadata, trees, self.num_queries_per_kv, query.device)
        programs = len(on_device.blocks) * self.num_kv_heads
        longest = max(row.seq_len for row in trees.rows)
        tree_attention_triton(
            query,
            kv_cache,
            attn_metadata.block_table,
            on_device,
            self.scale,
            output,
            num_splits(programs, longest, _num_processors(query.device)),
        )
        return output


def num_splits(programs: int, seq_len: int, num_processors: int) -> int:
    """Among how many programs to divide each request's slots, so that the device is full.

    Args:
        programs: of the kernel without splits.
        seq_len: of the longest request.
        num_processors: of the device; each runs about two programs.
    """
    wanted = 2 * num_processors // programs
    return max(1, min(wanted, seq_len // _MIN_SLOTS_PER_SPLIT, _MAX_SPLITS))


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _rest(metadata: TritonAttentionMetadata, trees: TreeBatch) -> RestOfBatch:
    rest = getattr(metadata, _REST_ATTRIBUTE, None)
    if rest is None:
        rest = rest_of_batch(metadata, trees)
        setattr(metadata, _REST_ATTRIBUTE, rest)
    return rest


def _device_trees(
    metadata: TritonAttentionMetadata, trees: TreeBatch, group: int, device: torch.device
) -> DeviceTrees:
    on_device = getattr(metadata, _DEVICE_TREES_ATTRIBUTE, None)
    if on_device is None:
        on_device = trees_on_device(trees, group, device)
        setattr(metadata, _DEVICE_TREES_ATTRIBUTE, on_device)
    return on_device


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """Registered as ``CUSTOM`` by the GPU worker of tree speculation."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonMetadataBuilder]:
        return TreeTritonMetadataBuilder
