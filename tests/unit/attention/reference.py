"""Tree attention by its definition: the oracle of every kernel."""

from __future__ import annotations

import numpy as np

from vllm_trie.tree import TokenTree


def tree_attention_reference(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    tree: TokenTree,
    scale: float,
    alibi_slopes: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the attention of one request's scheduled tokens, by query and head.

    Args:
        query: [num_queries, num_heads, head_size], committed tokens of the step, then the nodes.
        keys: [seq_len, num_kv_heads, head_size], the nodes' own keys last.
        values: [seq_len, num_kv_heads, head_size].
        tree: the N nodes, N < num_queries <= seq_len.
        scale: factor on the scores.
        alibi_slopes: [num_heads]; the slope times the distance between query and key in the text
            is subtracted from the score.

    Returns:
        float64 [num_queries, num_heads, head_size].
    """
    num_queries, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    committed = seq_len - tree.num_nodes
    output = np.zeros(query.shape, dtype=np.float64)
    for row in range(num_queries):
        position = seq_len - num_queries + row
        if position < committed:
            visible = list(range(position + 1))
        else:
            visible = list(range(committed))
            node, path = position - committed, []
            while node >= 0:
                path.append(committed + node)
                node = int(tree.parents[node])
            visible += reversed(path)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            q = query[row, head].astype(np.float64)
            scores = scale * (keys[visible, kv_head].astype(np.float64) @ q)
            if alibi_slopes is not None:
                distances = np.arange(len(visible))[::-1]
                scores -= float(alibi_slopes[head]) * distances
            weights = np.exp(scores - scores.max())
            output[row, head] = weights / weights.sum() @ values[visible, kv_head]
    return output
