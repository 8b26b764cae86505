"""The best continuations of many hypotheses, out of all rows and tokens together.

A step of a search of width ``b`` needs about ``2 * b`` continuations in all. The best ``2 * b`` of
every row would be hundreds of times as many, and sorting ``rows * vocabulary`` scores costs more
still for large vocabularies. The selection here reads the scores once, for the largest of each
block of neighbouring tokens::

    row 0   [ block max | block max | ... ]     the k-th largest of all maxima is a bound:
    row 1   [ block max | block max | ... ]     k scores reach it, so the best k do, too

Only blocks that reach the bound are looked into: about k of them. Log-probabilities of all rows
never exist together: those of a few rows at a time stay in a core's cache, and the scores of the
chosen blocks are computed again from their logits. The operations are those of ``log_softmax``, in
its order: ``(logit - largest logit) - log(sum)``, so that the results are equal bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.beam.candidates import Candidates

BLOCK = 128
"""Tokens of a block."""
_LEAST = np.float32(np.finfo(np.float32).min)
_CHUNK = 1 << 18
"""Log-probabilities that are computed at a time: 1 MiB, about a core's second-level cache."""


class TokenRules(NamedTuple):
    """What comes before the choice, for every token of the vocabulary.

    As in Hugging Face's ``generate``, the log-probabilities are those of all tokens, and the rules
    change them without a new normalization.

    Attributes:
        biased: int64[n], distinct tokens.
        bias: float32[n], what is added to their log-probabilities.
        allowed: int32[rows, words] or int32[1, words] for all rows alike: token ``t`` may follow if
            bit ``t % 32`` of word ``t // 32`` is set. None if every token may.
    """

    biased: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray | None

    def apply(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, vocabulary], a new tensor; ``-inf`` for what may not follow."""
        result = logprobs.clone()
        biased = torch.from_numpy(self.biased).to(result.device)
        result[:, biased] += torch.from_numpy(self.bias).to(result.device)
        if self.allowed is not None:
            bits = np.unpackbits(self.allowed.view(np.uint8), axis=1, bitorder="little")
            missing = max(0, result.shape[1] - bits.shape[1])
            bits = np.pad(bits[:, : result.shape[1]], ((0, 0), (0, missing)))
            result.masked_fill_(torch.from_numpy(bits == 0).to(result.device), -torch.inf)
        return result


def best_of_rows(logits: torch.Tensor, count: int, rules: TokenRules | None = None) -> Candidates:
    """Return the `count` best tokens of every row.

    Args:
        logits: float[rows, vocabulary].
        count: At most the vocabulary.
        rules: They decide what is best; None if there are none.

    Returns:
        int32 tokens and their log-probabilities before the bias; ``-inf`` for those that may not
        follow.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    if rules is None:
        values, token_ids = logprobs.topk(count, dim=-1)
    else:
        ruled, token_ids = rules.apply(logprobs).topk(count, dim=-1)
        values = logprobs.gather(1, token_ids).masked_fill(ruled == -torch.inf, -torch.inf)
    return Candidates.of_rows(token_ids.int().cpu().numpy(), values.cpu().numpy())


class _Blocks(NamedTuple):
    """The largest log-probabilities of blocks of tokens, and what makes those of single tokens.

    Attributes:
        maxima: float32 [rows, blocks]; the last block of a row may be shorter.
        largest: float32 [rows], the largest logits.
        highest: float32 [rows], the largest log-probabilities. A row's others are
            ``(logits - largest) + highest``.
    """

    maxima: torch.Tensor
    largest: torch.Tensor
    highest: torch.Tensor


def _blocks_of(logits: torch.Tensor, block_size: int) -> _Blocks:
    """Return the blocks of `logits`, float [rows, vocabulary]."""
    rows, vocab_size = logits.shape
    rows_at_once = min(rows, max(1, _CHUNK // vocab_size))
    maxima = logits.new_empty((rows, -(-vocab_size // block_size)), dtype=torch.float32)
    largest = logits.new_empty(rows, dtype=torch.float32)
    buffer = logits.new_empty((rows_at_once, vocab_size), dtype=torch.float32)
    for first in range(0, rows, rows_at_once):
        part = slice(first, first + rows_at_once)
        values = logits[part].float()
        logprobs = buffer[: len(values)]
        torch.amax(values, -1, out=largest[part])
        torch.log_softmax(values, -1, out=logprobs)
        _write_maxima(logprobs, block_size, maxima[part])
    return _Blocks(maxima, largest, maxima.amax(-1))


def _write_maxima(values: torch.Tensor, block_size: int, maxima: torch.Tensor) -> None:
    """Write the largest values of each block into `maxima`, float32 [rows, blocks]."""
    full = values.shape[1] // block_size
    in_full = values[:, : full * block_size].view(len(values), full, block_size)
    torch.amax(in_full, -1, out=maxima[:, :full])
    if full < maxima.shape[1]:
        torch.amax(values[:, full * block_size :], -1, out=maxima[:, full])


def _blocks_at(
    values: torch.Tensor,
    block_size: int,
    rows: np.ndarray,
    places: np.ndarray,
    largest: torch.Tensor | None = None,
    highest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float32 [n, block_size], log-probabilities of some blocks; -inf behind the last token.

    Args:
        values: float [rows, vocabulary], log-probabilities, or logits with `largest`.
        block_size: At most the vocabulary.
        rows: int64 [n].
        places: int64 [n], of the blocks in their rows.
        largest, highest: As in :class:`_Blocks`.
    """
    full, rest = divmod(values.shape[1], block_size)
    blocks = values[:, : full * block_size].view(len(values), full, block_size)
    row_index, block_index = (torch.from_numpy(each).to(values.device) for each in (rows, places))
    result: torch.Tensor = blocks[row_index, block_index.clamp(max=full - 1)].float()
    if rest:
        is_last = block_index == full
        result[is_last] = -torch.inf
        result[is_last, :rest] = values[row_index[is_last], full * block_size :].float()
    if largest is not None and highest is not None:
        result.sub_(largest[row_index, None]).add_(highest[row_index, None])
    return result


def select_best(
    logits: torch.Tensor,
    totals: np.ndarray,
    count: int,
    rules: TokenRules | None = None,
    rows_of_logits: np.ndarray | None = None,
) -> Candidates:
    """Return the `count` best continuations of all rows together.

    A tie goes to the earlier row, then to the better token, then to the smaller one. Rows with a
    NaN have no continuations. The scores are float32 sums, as in Hugging Face's ``generate``.

    Args:
        logits: float [rows, vocabulary].
        totals: float32 [rows], cumulative log-probabilities of the rows.
        count: Fewer are returned if there are not as many of a probability above 0.
        rules: They come before the choice; None if there are none.
        rows_of_logits: int [rows], the row of the search that each row of logits belongs to, which
            saves a copy of them in order; None if they are in order. Not with rules.
    """
    if rows_of_logits is not None:
        assert rules is None
        totals = totals[rows_of_logits]
    vocab_size = logits.shape[1]
    block_size = min(BLOCK, vocab_size)
    if rules is None:
        ranked = logits
        table, *terms = _blocks_of(logits, block_size)
    else:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        ranked = rules.apply(logprobs)
        table = ranked.new_empty((len(ranked), -(-vocab_size // block_size)))
        _write_maxima(ranked, block_size, table)
        terms = []
    maxima = table.cpu().numpy()
    maxima += totals[:, None]
    bound = _bound(maxima.ravel(), count)
    rows, blocks = np.divmod(np.flatnonzero(maxima >= bound), maxima.shape[1])
    keys = _blocks_at(ranked, block_size, rows, blocks, *terms).cpu().numpy()
    scores = keys + totals[rows, None]
    places = np.flatnonzero(scores >= bound)
    scores = scores.ravel()[places]
    kept = scores >= _bound(scores, count)
    places, scores = places[kept], scores[kept]
    keys = keys.ravel()[places]
    block, token = np.divmod(places, block_size)
    rows, token_ids = rows[block], blocks[block] * block_size + token
    if rows_of_logits is not None:
        rows = rows_of_logits[rows]
    order = np.lexsort((token_ids, -keys, rows))
    if len(order) > count:  # ties at the bound
        best = np.argsort(-scores[order], kind="stable")[:count]
        order = order[np.sort(best)]
    rows, token_ids = rows[order], token_ids[order]
    if rules is None:
        return Candidates(rows, token_ids, keys[order])
    values = logprobs[torch.from_numpy(rows), torch.from_numpy(token_ids)]
    return Candidates(rows, token_ids, values.cpu().numpy())


def _bound(scores: np.ndarray, count: int) -> np.float32:
    """Return the `count`-th largest score, or what all finite ones reach; makes others finite."""
    np.fmax(scores, _LEAST, out=scores)
    if count >= len(scores):
        return _LEAST
    best = torch.from_numpy(scores).topk(count, sorted=False).values
    return np.float32(best.min().item())
