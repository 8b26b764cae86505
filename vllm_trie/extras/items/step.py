"""One step of a constrained search: the best continuations among valid children only.

The logits of valid children are gathered; nothing of the size rows x vocabulary is made or sorted,
except for the normalizer. With ``normalize="vocabulary"`` the scores are those of Hugging Face's
``prefix_allowed_tokens_fn``: log-softmax over the vocabulary first, then the mask.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import numpy as np
import torch

from vllm_trie.attention.device_copy import to_device
from vllm_trie.extras.items.selection import SelectedTrie
from vllm_trie.extras.items.trie import ItemTrie
from vllm_trie.searches.blocks import rows_at_once
from vllm_trie.searches.unfetched import Unfetched

Normalize = Literal["vocabulary", "valid"]
Trie = ItemTrie | SelectedTrie


class Continuations(NamedTuple):
    """Candidates of one step, by row, best first within a row.

    Attributes:
        rows: int64 [c].
        targets: int32 [c]. ``node`` extends the row's hypothesis to a node below which items go on;
            ``~node``, a negative number, completes the item that ends at the node.
        logprobs: float32 [c], log-probabilities of the candidates' tokens, and the item's share of
            the score if it is completed.
    """

    rows: np.ndarray
    targets: np.ndarray
    logprobs: np.ndarray


def nodes_of(targets: np.ndarray) -> np.ndarray:
    """Return the nodes that candidates lead to."""
    return np.where(targets < 0, ~targets, targets)


def tokens_of(trie: Trie, targets: np.ndarray, eos_token_id: int | None) -> np.ndarray:
    """Return int32[...], the tokens of candidates: with EOS, it completes an item."""
    tokens: np.ndarray = trie.tokens[nodes_of(targets)]
    return tokens if eos_token_id is None else np.where(targets < 0, eos_token_id, tokens)


def best_continuations(
    trie: Trie,
    logits: torch.Tensor,
    nodes: np.ndarray,
    totals: np.ndarray,
    width: int,
    eos_token_id: int | None = None,
    normalize: Normalize = "vocabulary",
    weight_factor: float = 0.0,
) -> Unfetched[Continuations]:
    """Return the best continuations of all rows together.

    These are the best `width` of those that complete an item, and the best `width` of those that go
    on: all that a search of this width can use.

    Args:
        trie: The catalogue.
        logits: float [rows, vocabulary]; log-probabilities serve as well.
        nodes: int [rows], where each row's hypothesis is in the trie.
        totals: float32 [rows], its cumulative log-probability.
        width: The beam width.
        eos_token_id: Token that completes an item; None: its last token does.
        normalize: Make probabilities over the whole vocabulary or over the valid tokens.
        weight_factor: Completing an item adds its weight, times this, to the score.
    """
    children = trie.children(nodes)
    rows, targets = children.parents, children.nodes
    if eos_token_id is not None:
        complete = np.flatnonzero(trie.is_terminal(nodes))
        rows = np.concatenate([complete, rows])
        targets = np.concatenate([~np.asarray(nodes, dtype=np.int32)[complete], targets])
    tokens = tokens_of(trie, targets, eos_token_id)
    device = logits.device
    row_index = to_device(rows, device)
    values = logits[row_index, to_device(tokens.astype(np.int64), device)].float()
    if normalize == "valid":
        normalizer = _segment_logsumexp(values, row_index, len(logits))
    else:
        parts = torch.split(logits, rows_at_once(logits))
        normalizer = torch.cat([part.float().logsumexp(dim=-1) for part in parts])
    logprobs = values - normalizer[row_index]
    if eos_token_id is None:  # a token may complete an item and go on, which are two candidates
        ends = np.flatnonzero(trie.is_terminal(targets))
        continues = np.flatnonzero(trie.has_children(targets))
        chosen = np.concatenate([ends, continues])
        rows, targets = rows[chosen], np.concatenate([~targets[ends], targets[continues]])
        chosen_index = to_device(chosen, device)
        row_index, logprobs = row_index[chosen_index], logprobs[chosen_index]
    num_ends = int((targets < 0).sum())  # they come first
    if weight_factor:
        weights = weight_factor * trie.item_weights(~targets[:num_ends])
        logprobs[:num_ends] += to_device(weights.astype(np.float32), device)
    scores = logprobs + to_device(totals, device)[row_index]
    # Not the best of both together: of two equal ones, either could be missing.
    kinds = (scores[:num_ends], scores[num_ends:])
    best = [kind.topk(min(width, len(kind)), sorted=False).indices for kind in kinds]
    kept_index = torch.cat([best[0], best[1] + num_ends])
    finish = functools.partial(_in_order, rows, targets)
    return Unfetched((kept_index, logprobs[kept_index]), finish)


def _in_order(
    rows: np.ndarray, targets: np.ndarray, kept: np.ndarray, logprobs: np.ndarray
) -> Continuations:
    """Return the candidates at the places `kept`, by row, best first within a row."""
    order = np.lexsort((kept, -logprobs, rows[kept]))
    kept = kept[order]
    return Continuations(rows[kept], targets[kept], logprobs[order])


def _segment_logsumexp(
    values: torch.Tensor, segments: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Return float [num_segments], the logarithm of each segment's sum of exponentials."""
    largest = values.new_full((num_segments,), -torch.inf)
    largest.scatter_reduce_(0, segments, values, "amax")
    sums = values.new_zeros(num_segments)
    sums.index_add_(0, segments, (values - largest[segments]).exp())
    return largest + sums.log()
