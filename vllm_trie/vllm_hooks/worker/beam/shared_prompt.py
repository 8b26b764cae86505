"""Attention of the rows of searches on CPUs: the prompt's KV is read once for all rows of a group.

vLLM's kernel attends to one request after another. In a step that decodes one token of every row,
and of nothing else, the rows' queries over the slots of the prompt are one matrix product instead,
and each row adds the slots that it has generated. The kernel is that of tree attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_trie.attention import TreeBatch, TreeRow, build_tree_batch, choose_kernels
from vllm_trie.attention.cache_layout import SUPPORTED_ISAS
from vllm_trie.attention.tree_batch import NO_NODES
from vllm_trie.vllm_hooks.scheduler.items.catalogues import ItemStep
from vllm_trie.vllm_hooks.scheduler.row_steps import SelectionStep

if TYPE_CHECKING:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.gpu_input_batch import InputBatch

_SEARCHES = "vllm_trie_searches"
"""Attribute of the attention metadata with the rows of a step, as :func:`rows_of_searches`."""


def rows_of_searches(
    steps: Sequence[SelectionStep | ItemStep], batch: InputBatch
) -> TreeBatch | None:
    """Return the rows of a step in which every request has one token.

    Neighbours in the batch are one :class:`TreeRow`. None if the step has other requests, or rows
    that are not as far as their siblings.
    """
    if sum(len(step.row_ids) for step in steps) != batch.num_reqs:
        return None
    rows: list[TreeRow] = []
    for step in steps:
        places = np.sort([batch.req_id_to_index[row_id] for row_id in step.row_ids])
        lengths = batch.num_computed_tokens_cpu[places] + 1
        length = int(lengths[0])
        if length <= step.prompt_len or (lengths != length).any():
            return None
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            first = int(run[0])
            rows.append(TreeRow(first, first, len(run), 0, length, step.prompt_len))
    return build_tree_batch(rows, [NO_NODES] * len(rows), batch.num_reqs)


def share_prompts(
    built: Any, steps: Sequence[SelectionStep | ItemStep], batch: InputBatch, max_query_len: int
) -> None:
    """Tell the layers of a step, through their attention metadata, which rows share prompts.

    Args:
        built: What vLLM's runner has built.
        steps: The rows of the step.
        batch: The batch.
        max_query_len: Most tokens of a request in this step.
    """
    if steps and max_query_len == 1 and (rows := rows_of_searches(steps, batch)) is not None:
        for metadata in {id(each): each for each in built[0].values()}.values():
            setattr(metadata, _SEARCHES, rows)


def wrap_forward(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attend to the rows of searches together, where the kernel takes the layer."""

    @functools.wraps(original)
    def forward(
        self: CPUAttentionBackendImpl,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows: TreeBatch | None = getattr(attn_metadata, _SEARCHES, None)
        if (
            rows is not None
            and _is_plain(self, layer)
            and (kernels := choose_kernels()) is not None
            and kernels.tree_attention(
                query, kv_cache, attn_metadata.block_table, rows, self.scale, output
            )
        ):
            return output
        return original(
            self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )

    return forward


def _is_plain(attention: CPUAttentionBackendImpl, layer: Any) -> bool:
    """Return whether a layer has nothing that the kernel lacks."""
    return (
        layer.isa in SUPPORTED_ISAS
        and attention.sliding_window == -1
        and attention.alibi_slopes is None
        and attention.sinks is None
        and not attention.logits_soft_cap
        and attention.attn_type == "decoder"
    )
