"""One step of a constrained search: the best continuations among valid children only.

The logits of valid children are gathered; nothing of the size rows x vocabulary is made or sorted,
except for the normalizer. With ``normalize="vocabulary"`` the scores are those of Hugging Face's
``prefix_allowed_tokens_fn``: log-softmax over the vocabulary first, then the mask.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch

from vllm_trie.items.trie import ItemTrie

Normalize = Literal["vocabulary", "valid"]


class Continuations(NamedTuple):
    """Candidates of one step, by row, best first within a row.

    Attributes:
        rows: int64[c].
        nodes: int32[c], the node that the candidate leads to; the row's own node for EOS.
        logprobs: float32[c], log-probabilities of the candidates' tokens.
    """

    rows: np.ndarray
    nodes: np.ndarray
    logprobs: np.ndarray


class RowCandidates(NamedTuple):
    """The same as arrays with a row for each row.

    Attributes:
        nodes: int32[rows, k], 0 where a row has fewer than k candidates.
        logprobs: float32[rows, k], -inf there.
    """

    nodes: np.ndarray
    logprobs: np.ndarray


def best_continuations(
    trie: ItemTrie,
    logits: torch.Tensor,
    nodes: np.ndarray,
    totals: np.ndarray,
    width: int,
    eos_token_id: int | None = None,
    normalize: Normalize = "vocabulary",
) -> Continuations:
    """Return the best continuations of all rows together.

    These are the best `width` of all, and the best `width` of those that can go on: all that a
    search of this width can use, at most ``2 * width``.

    Args:
        trie: The catalogue.
        logits: float[rows, vocabulary]; log-probabilities serve as well.
        nodes: int[rows], where each row's hypothesis is in the trie.
        totals: float32[rows], its cumulative log-probability.
        width: The beam width.
        eos_token_id: Token that ends a complete item; None: nothing follows it.
        normalize: Make probabilities over the whole vocabulary or over the valid tokens.
    """
    children = trie.children(nodes)
    rows, targets, tokens = children.parents, children.nodes, children.token_ids
    if eos_token_id is None:
        goes_on = trie.has_children(targets)
    else:
        ends = np.flatnonzero(trie.is_terminal(nodes))
        goes_on = np.arange(len(rows) + len(ends)) < len(rows)
        rows = np.concatenate([rows, ends])
        targets = np.concatenate([targets, np.asarray(nodes, dtype=np.int32)[ends]])
        tokens = np.concatenate([tokens, np.full(len(ends), eos_token_id, dtype=np.int32)])
    device = logits.device
    row_index = torch.from_numpy(rows).to(device)
    values = logits[row_index, torch.from_numpy(tokens.astype(np.int64)).to(device)].float()
    if normalize == "valid":
        normalizer = _segment_logsumexp(values, row_index, len(logits))
    else:
        normalizer = logits.float().logsumexp(dim=-1)
    logprobs = values - normalizer[row_index]
    scores = logprobs + torch.as_tensor(totals, dtype=torch.float32, device=device)[row_index]
    kept = scores.topk(min(width, len(scores)), sorted=False).indices.cpu().numpy()
    if not goes_on.all():
        scores.masked_fill_(torch.from_numpy(~goes_on).to(device), -torch.inf)
        count = min(width, int(goes_on.sum()))
        kept = np.union1d(kept, scores.topk(count, sorted=False).indices.cpu().numpy())
    found = logprobs[torch.from_numpy(kept).to(device)].cpu().numpy()
    order = np.lexsort((kept, -found, rows[kept]))
    kept = kept[order]
    return Continuations(rows[kept], targets[kept], found[order])


def by_row(found: Continuations, num_rows: int) -> RowCandidates:
    """Return candidates as arrays of `num_rows` rows, wide enough for all."""
    counts = np.bincount(found.rows, minlength=num_rows)
    columns = np.arange(len(found.rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    nodes = np.zeros((num_rows, max(1, counts.max(initial=0))), dtype=np.int32)
    logprobs = np.full(nodes.shape, -np.inf, dtype=np.float32)
    nodes[found.rows, columns] = found.nodes
    logprobs[found.rows, columns] = found.logprobs
    return RowCandidates(nodes, logprobs)


def _segment_logsumexp(
    values: torch.Tensor, segments: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Return float[num_segments], the logarithm of each segment's sum of exponentials."""
    largest = values.new_full((num_segments,), -torch.inf)
    largest.scatter_reduce_(0, segments, values, "amax")
    sums = values.new_zeros(num_segments)
    sums.index_add_(0, segments, (values - largest[segments]).exp())
    return largest + sums.log()
