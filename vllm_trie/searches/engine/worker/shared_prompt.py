"""Attention of the rows of searches on CPUs: the prompt's KV is read once for all rows of a group.

vLLM's kernel attends to one request after another. In a step of beams, and of nothing else, the
beams' queries over the slots of the prompt are one matrix product instead,
and each beam adds the slots that it has generated. The kernel is that of tree attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_trie.attention import (
    AttentionKind,
    TreeBatch,
    TreeRow,
    build_tree_batch,
    choose_kernels,
)
from vllm_trie.attention.tree_batch import NO_NODES
from vllm_trie.hooks.ledger.record import PREFIX, of_beams
from vllm_trie.hooks.start.cpu_cache import is_readable

if TYPE_CHECKING:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vllm_trie.searches.engine.search_wire import BeamStep

_SEARCHES = "vllm_trie_searches"
"""Attribute of the attention metadata with the rows of a step, a :class:`TreeBatch`."""


def share_prompts(built: Any, steps: Sequence[BeamStep]) -> None:
    """Tell the layers of a step, through their attention metadata, which rows share prompts.

    Args:
        built: What vLLM's runner has built.
        steps: Their beams are all rows of the step, in order.
    """
    rows: list[TreeRow] = []
    first = 0
    for step in steps:
        count = step.num_beams
        rows.append(TreeRow(first, first, count, 0, step.num_computed + 1, step.prompt_len))
        first += count
    batch = build_tree_batch(rows, [NO_NODES] * len(rows), first)
    for metadata in {id(of_layer): of_layer for of_layer in built[0].values()}.values():
        setattr(metadata, _SEARCHES, batch)


@of_beams("v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.", PREFIX, platform="cpu").wraps(
    "forward", "attends to the beams of searches together"
)
def forward(
    original: Callable[..., torch.Tensor],
    self: CPUAttentionBackendImpl,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Attend to the rows of searches together, where the kernel takes the layer."""
    rows: TreeBatch | None = getattr(attn_metadata, _SEARCHES, None)
    if (
        rows is not None
        and _is_plain(self, layer)
        and choose_kernels().tree_attention(
            *(query, kv_cache, attn_metadata.block_table, rows, self.scale, output),
            *(_kind(self), layer.isa),
        )
    ):
        return output
    return original(
        self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
    )


def _is_plain(attention: CPUAttentionBackendImpl, layer: Any) -> bool:
    """Return whether a layer has nothing that the kernel lacks."""
    return (
        is_readable(layer.isa)
        and attention.sliding_window == -1
        and not getattr(layer, "attention_chunk_size", None)
        and attention.alibi_slopes is None
        and attention.attn_type == "decoder"
    )


def _kind(attention: CPUAttentionBackendImpl) -> AttentionKind:
    sinks = attention.sinks
    return AttentionKind(
        soft_cap=attention.logits_soft_cap, sinks=None if sinks is None else sinks.float()
    )
