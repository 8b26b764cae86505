"""vLLM's Triton attention backend, with tree attention for every row but prefill chunks.

The kernels compile for compute capabilities 7.5 to 12.0 and have run on an H200.
Results are checked before an engine serves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

from vllm_trie.attention import AttentionKind, TreeBatch
from vllm_trie.attention.cache_layout import move_rows_in_layers
from vllm_trie.attention.gpu_launch import TreeBuffers
from vllm_trie.attention.triton_kernel import EVERY_LENGTH, tree_attention_triton
from vllm_trie.drafts.engine.attention.tree_attention import TreeAttention
from vllm_trie.hooks.ledger.record import TREE_MASKS, Symbols
from vllm_trie.tree import words_per_node

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

_TRITON = "v1.attention.backends.triton_attn:TritonAttention"
_backend = Symbols(f"{_TRITON}Backend.", TREE_MASKS, platform="cuda")
_backend("supported_kv_cache_dtypes", "overridden", "names those that the tree kernel reads")
_impl = Symbols(f"{_TRITON}Impl.", TREE_MASKS, platform="cuda")
_builder = Symbols(f"{_TRITON}MetadataBuilder.", TREE_MASKS, platform="cuda")
_CHECKED_REQUESTS, _CHECKED_WORDS = 8, 1024
"""Room for the trees of the check at start-up, which may be larger than the engine's."""
_FLOAT8 = ("fp8", "fp8_e4m3")
"""Names of quantized KV caches that vLLM's backend stores as e4m3 with a factor for each layer."""


class TreeTritonMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step, and its trees.

    Setting ``draft_trees`` writes them to the device: a CUDA graph that is replayed calls no layer.

    Attributes:
        buffers: Of the builder.
        longest_decode: Query tokens of the longest request that is no prefill chunk.
        stock: What vLLM's kernel takes. In layers that attend in chunks, steps with a prefill chunk
            have a request for each attention chunk there.
        is_captured: A CUDA graph captures the step, and serves any step of its size later.
        has_trees: Whether any request of the step has one.
    """

    buffers: TreeBuffers
    longest_decode: int
    stock: TritonAttentionMetadata
    is_captured = False
    has_trees = False

    @property
    def draft_trees(self) -> TreeBatch | None:
        """Return nothing: the trees are on the device only."""
        return None

    @draft_trees.setter
    def draft_trees(self, trees: TreeBatch | None) -> None:
        self.buffers.write(trees)
        self.has_trees = trees is not None


class TreeTritonMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builds metadata whose tensors stay where they are from step to step.

    The kernel takes its launch from the padded sizes of a step and all else from these tensors, so
    a graph may capture any batch: ``ALWAYS``.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        max_requests = vllm_config.scheduler_config.max_num_seqs
        max_nodes = vllm_config.num_speculative_tokens
        layers = vllm_config.compilation_config.static_forward_context
        kinds = [layers[name].impl.kind_of(layers[name]) for name in layer_names]
        self.chunk = kinds[0].chunk
        if self.chunk:
            # vLLM's subclass makes a request of each attention chunk, by lengths that the host has
            # to wait for; the tree kernel masks chunks itself.
            self.__class__ = TreeTritonMetadataBuilder
        self.longest_decode = 1 + max_nodes
        self.buffers = TreeBuffers(
            max(max_requests, _CHECKED_REQUESTS),
            max(max_requests * max_nodes * words_per_node(max_nodes), _CHECKED_WORDS),
            kv_cache_spec.head_size,
            _num_processors(device),
            device,
            with_offsets=any(kind.is_partial for kind in kinds),
        )

    @_builder.overrides("adds the buffers that hold the step's trees")
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeTritonMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = TreeTritonMetadata(**vars(stock))
        metadata.buffers = self.buffers
        metadata.longest_decode = self.longest_decode
        if self.chunk and common_attn_metadata.max_query_len > self.longest_decode:
            chunks, _ = make_local_attention_virtual_batches(
                self.chunk, common_attn_metadata, self.block_size
            )
            stock = super().build(common_prefix_len, chunks, fast_build)
        metadata.stock = stock
        metadata.draft_trees = None
        return metadata

    @_builder.overrides("marks the step; a graph of the tree kernel serves every row")
    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TreeTritonMetadata:
        metadata = self.build(0, common_attn_metadata)
        metadata.is_captured = True
        # Short, as capturing runs the kernels, and no less than a request's query tokens.
        most = self.vllm_config.model_config.max_model_len
        metadata.seq_lens.fill_(min(metadata.max_query_len, most))
        return metadata


class TreeTritonAttentionImpl(TreeAttention, TritonAttentionImpl):
    """Attention of one layer."""

    move_slots = staticmethod(move_rows_in_layers)
    stock_forward = TritonAttentionImpl.forward

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_float8 = self.kv_cache_dtype in _FLOAT8
        self.supports_quant_query_input = False
        unsupported = {
            "ALiBi slopes": self.alibi_slopes is not None,
            "a limit on the chunks it looks back to": self.chunk_lookback > -1,
            f"a KV cache of the kind {self.kv_cache_dtype!r}": not self.is_float8
            and self.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            f"the type {self.attn_type!r}": self.attn_type != AttentionType.DECODER,
        }
        self.refuse(unsupported)

    def kind_of(self, layer: Any) -> AttentionKind:
        """Return the attention of the layer that this serves."""
        chunk = getattr(layer, "attention_chunk_size", None) or 0
        return AttentionKind(1 + self.sliding_window[0], chunk, self.logits_soft_cap, self.sinks)

    @_impl.overrides("quantizes no output")
    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return False

    @_impl.overrides("gives all rows but prefill chunks tree attention")
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
        """Serve every row with the tree kernel; in steps with a prefill chunk, let vLLM's kernel go
        over the whole batch first and replace the other rows if there are trees."""
        metadata = attn_metadata
        longest = EVERY_LENGTH
        if metadata is None or (
            metadata.max_query_len > metadata.longest_decode and not metadata.is_captured
        ):
            stock, scales = metadata and metadata.stock, (output_scale, output_block_scale)
            self.stock_forward(layer, query, key, value, kv_cache, stock, output, *scales)
            if metadata is None or not metadata.has_trees:
                return output
            longest = metadata.longest_decode
        kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.is_float8:
            kv_cache, kv_scales = kv_cache.view(self.fp8_dtype), (layer._k_scale, layer._v_scale)
        tree_attention_triton(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.buffers,
            self.scale,
            output,
            min(metadata.max_query_len, longest),
            longest,
            kv_scales,
            self.kind_of(layer),
        )
        return output


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """Registered as ``CUSTOM`` by the GPU worker of tree speculation."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    @_backend.overrides("names the place where it is registered")
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    @_backend.overrides("names the attention with trees")
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        return TreeTritonAttentionImpl

    @staticmethod
    @_backend.overrides("names the builder of its metadata")
    def get_builder_cls() -> type[TreeTritonMetadataBuilder]:
        return TreeTritonMetadataBuilder

    # The first two mask by fields of the metadata that the tree kernel does not read; the third
    # fixes an order of sums, which splits change.

    @classmethod
    @_backend.overrides("answers no")
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    @_backend.overrides("answers no")
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    @_backend.overrides("answers no")
    def supports_batch_invariance(cls) -> bool:
        return False
