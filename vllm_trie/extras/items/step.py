"""One step of constrained searches: the best continuations among valid children only.

The logits of valid children are gathered; nothing of the size rows x vocabulary is made or sorted,
except for the normalizer. With ``normalize="vocabulary"`` the scores are those of Hugging Face's
``prefix_allowed_tokens_fn``: log-softmax over the vocabulary first, then the mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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


class ItemStep(NamedTuple):
    """A step of one search.

    Attributes:
        nodes: int [rows], where each row's hypothesis is in the trie.
        totals: float32 [rows], its cumulative log-probability.
        width: The beam width.
        eos_token_id: Token that completes an item; None: its last token does.
        weight_factor: Completing an item adds its weight, times this, to the score.
    """

    nodes: np.ndarray
    totals: np.ndarray
    width: int
    eos_token_id: int | None = None
    weight_factor: float = 0.0


class _Valid(NamedTuple):
    """The valid continuations of a search, and the candidates that they are.

    Attributes:
        rows: int64 [c], of the search.
        tokens: int64 [c].
        chosen: int64 [n], the continuation that each candidate is: a token may complete an item and
            go on, which are two candidates. Those that complete an item come first.
        targets: int32 [n], see :class:`Continuations`.
        weights: float32 [n], what is added to the log-probabilities.
    """

    rows: np.ndarray
    tokens: np.ndarray
    chosen: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def _valid(trie: Trie, step: ItemStep) -> _Valid:
    nodes, eos_token_id = step.nodes, step.eos_token_id
    children = trie.children(nodes)
    rows, targets = children.parents, children.nodes
    if eos_token_id is not None:
        complete = np.flatnonzero(trie.is_terminal(nodes))
        rows = np.concatenate([complete, rows])
        targets = np.concatenate([~np.asarray(nodes, dtype=np.int32)[complete], targets])
    tokens = tokens_of(trie, targets, eos_token_id).astype(np.int64)
    chosen = np.arange(len(rows))
    if eos_token_id is None:
        ends = np.flatnonzero(trie.is_terminal(targets))
        continues = np.flatnonzero(trie.has_children(targets))
        chosen = np.concatenate([ends, continues])
        targets = np.concatenate([~targets[ends], targets[continues]])
    weights = np.zeros(len(targets), dtype=np.float32)
    if step.weight_factor:
        is_end = targets < 0
        weights[is_end] = step.weight_factor * trie.item_weights(~targets[is_end])
    return _Valid(rows, tokens, chosen, targets, weights)


def best_continuations(
    tries: Sequence[Trie],
    steps: Sequence[ItemStep],
    logits: torch.Tensor,
    normalize: Normalize = "vocabulary",
) -> Unfetched[list[Continuations]]:
    """Return the best continuations of each search, out of all its rows together.

    These are the best `width` of those that complete an item, and the best `width` of those that go
    on: all that a search of this width can use.

    Args:
        tries: The catalogue of each search.
        steps: What each search asks for.
        logits: float [rows, vocabulary], the rows of one search behind those of another;
            log-probabilities serve as well.
        normalize: Make probabilities over the whole vocabulary or over the valid tokens.
    """
    device = logits.device
    valid = list(map(_valid, tries, steps))
    first_rows, _ = _bounds([len(step.nodes) for step in steps])
    firsts, _ = _bounds([len(part.rows) for part in valid])
    rows = np.concatenate([v.rows + first for v, first in zip(valid, first_rows, strict=True)])
    row_index = to_device(rows, device)
    tokens = to_device(np.concatenate([part.tokens for part in valid]), device)
    values = logits[row_index, tokens].float()
    if normalize == "valid":
        normalizer = _segment_logsumexp(values, row_index, len(logits))
    else:
        parts = torch.split(logits, rows_at_once(logits))
        normalizer = torch.cat([part.float().logsumexp(dim=-1) for part in parts])
    logprobs = values - normalizer[row_index]
    chosen = np.concatenate([v.chosen + first for v, first in zip(valid, firsts, strict=True)])
    chosen_index = to_device(chosen, device)
    row_index, logprobs = row_index[chosen_index], logprobs[chosen_index]
    if any(step.weight_factor for step in steps):
        logprobs += to_device(np.concatenate([part.weights for part in valid]), device)
    totals = np.concatenate([step.totals for step in steps])
    scores = logprobs + to_device(totals, device)[row_index]
    scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)  # no row of NaN before others
    # Not the best of both kinds together: of two equal ones, either could be missing.
    sizes = [int(kind.sum()) for part in valid for kind in (part.targets < 0, part.targets >= 0)]
    counts = np.minimum(np.repeat([step.width for step in steps], 2), sizes)
    begins, ends = _bounds(sizes)
    kinds = zip(begins, ends, counts.tolist(), strict=True)
    best = [
        scores[begin:end].topk(count, sorted=False).indices for begin, end, count in kinds if count
    ]
    kept_index = torch.cat(best or [row_index[:0]]) + to_device(np.repeat(begins, counts), device)
    of_search = np.concatenate([part.rows[part.chosen] for part in valid])
    targets = np.concatenate([part.targets for part in valid])
    num_kept = counts.reshape(-1, 2).sum(axis=1)
    finish = functools.partial(_in_order, of_search, targets, num_kept)
    return Unfetched((kept_index, logprobs[kept_index]), finish)


def _bounds(sizes: np.ndarray | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 [n] twice, where parts of these sizes begin and end, one behind another."""
    ends = np.cumsum(sizes)
    return ends - sizes, ends


def _in_order(
    rows: np.ndarray,
    targets: np.ndarray,
    counts: np.ndarray,
    kept: np.ndarray,
    logprobs: np.ndarray,
) -> list[Continuations]:
    """Return the candidates at the places `kept`, of each search by row, best first within a row.

    Args:
        rows, targets: Of all candidates.
        counts: int64 [searches], how many are kept of each.
        kept: int64 [candidates].
        logprobs: float32 [candidates], of those that are kept.
    """
    result = []
    for part in map(slice, *_bounds(counts)):
        order = np.lexsort((kept[part], -logprobs[part], rows[kept[part]]))
        of_search = kept[part][order]
        result.append(Continuations(rows[of_search], targets[of_search], logprobs[part][order]))
    return result


def _segment_logsumexp(
    values: torch.Tensor, segments: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Return float [num_segments], the logarithm of each segment's sum of exponentials."""
    largest = values.new_full((num_segments,), -torch.inf)
    largest.scatter_reduce_(0, segments, values, "amax")
    sums = values.new_zeros(num_segments)
    sums.index_add_(0, segments, (values - largest[segments]).exp())
    return largest + sums.log()
