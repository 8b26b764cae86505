"""Where a step's draft trees lie in the batch: token rows, positions and rows of logits.

The token rows of a request with a tree, which are also its KV slots in order::

    tokens     [ committed, not computed yet ][ node 0 ][ node 1 ] ... [ node N - 1 ]
    positions  [ flat, set by vLLM           ][ number of committed tokens - 1 + depth ]

The last committed token and each node have a row of logits: ``N + 1`` rows for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_trie.attention import TreeBatch, TreeRow, build_tree_batch, prefers_chains
from vllm_trie.attention.device_copy import to_device
from vllm_trie.vllm_hooks.worker.verification.pending_tree import PendingTree


def place_trees(
    runner: Any,
    trees: Sequence[PendingTree],
    num_scheduled_tokens: np.ndarray,
    num_tokens: int,
) -> TreeBatch | None:
    """Set the nodes' positions and describe the trees to the attention backend.

    Args:
        runner: vLLM's model runner after ``_prepare_inputs``; its ``positions`` and, for
            placeholders, its ``input_ids`` are changed.
        trees: tree of each batch row, empty ones included.
        num_scheduled_tokens: int [batch rows], token rows of each.
        num_tokens: their sum.

    Returns:
        The trees that need tree attention, ``None`` if none does.
    """
    ends = runner.query_start_loc.np[1:]
    computed = runner.input_batch.num_computed_tokens_cpu
    rows, words, positions = [], [], []
    takes_chains = prefers_chains(runner.device, runner.dtype, runner.kv_cache_dtype)
    for index, tree in enumerate(trees):
        num_nodes = len(tree.token_ids)
        if not num_nodes:
            continue
        end = int(ends[index])
        if tree.token_ids[-1] < 0:
            # Placeholders of the scheduler: no token, but the embedding must find one.
            runner.input_ids.gpu[end - num_nodes : end].clamp_(min=0)
        if not takes_chains and tree.tree.is_chain:
            continue  # to vLLM's kernel
        num_queries = int(num_scheduled_tokens[index])
        seq_len = int(computed[index]) + num_queries
        rows.append(TreeRow(index, end - num_queries, num_queries, num_nodes, seq_len))
        words.append(tree.tree.ancestor_words())
        positions.append((end - num_nodes, seq_len - num_nodes - 1 + tree.depths))
    if not rows:
        return None
    token_rows = np.concatenate([first + np.arange(len(p)) for first, p in positions])
    _set_positions(runner, token_rows, np.concatenate([p for _, p in positions]))
    return build_tree_batch(rows, words, num_tokens)


def _set_positions(runner: Any, token_rows: np.ndarray, values: np.ndarray) -> None:
    if runner.positions.device.type == "cpu":
        runner.positions.numpy()[token_rows] = values
    else:
        device = runner.positions.device
        runner.positions[to_device(token_rows, device)] = to_device(values, device)


def logits_metadata(
    num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray, device: torch.device
) -> SpecDecodeMetadata:
    """Of which token rows there are logits; all that the walk down the trees needs to know.

    vLLM's own method also computes what its rejection sampler reads. Those fields are empty here.

    Args:
        num_draft_tokens: int [batch rows], nodes of each row's tree.
        cu_num_scheduled_tokens: int [batch rows], where each row's token rows end.
        device: of the indices.
    """
    num_sampled = num_draft_tokens + 1
    ends = np.cumsum(num_sampled)
    rows = np.repeat(cu_num_scheduled_tokens - ends, num_sampled) + np.arange(ends[-1])
    logits_indices = to_device(rows.astype(np.int32), device)
    unused = logits_indices[:0]
    return SpecDecodeMetadata(
        draft_token_ids=unused,
        num_draft_tokens=num_draft_tokens.tolist(),
        cu_num_draft_tokens=unused,
        cu_num_sampled_tokens=unused,
        target_logits_indices=unused,
        bonus_logits_indices=unused,
        logits_indices=logits_indices,
    )
