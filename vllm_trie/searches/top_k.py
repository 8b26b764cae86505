"""The best continuations of many hypotheses, out of all rows and tokens together.

A step of a search of width ``b`` needs about ``2 * b`` continuations in all. The best ``2 * b`` of
every row would be hundreds of times as many, and sorting ``rows * vocabulary`` scores costs more
still for large vocabularies. The selection here reads the scores once, for the largest of each
block of neighbouring tokens::

    row 0   [ block max | block max | ... ]     the k-th largest of all maxima is a bound:
    row 1   [ block max | block max | ... ]     k scores reach it, so the best k do, too

Only blocks that reach the bound are looked into: about k of them. ``device_step.py`` is the same
choice for a device.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from vllm_trie.attention.device_copy import to_device
from vllm_trie.searches.blocks import TokenRules, blocks_of
from vllm_trie.searches.candidates import Candidates, Draws
from vllm_trie.searches.unfetched import Unfetched

_TINY = torch.finfo(torch.float32).tiny
_LEAST = np.float32(np.finfo(np.float32).min)


def best_of_rows(
    logits: torch.Tensor, count: int, rules: TokenRules | None = None
) -> Unfetched[Candidates]:
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
    return Unfetched((token_ids.int(), values), Candidates.of_rows)


def select_best(
    logits: torch.Tensor,
    totals: np.ndarray,
    count: int,
    rules: TokenRules | None = None,
) -> Candidates:
    """Return the `count` best continuations of all rows together.

    A tie goes to the earlier row, then to the better token, then to the smaller one. Rows with a
    NaN have no continuations. The scores are float32 sums, as in Hugging Face's ``generate``.

    Args:
        logits: float [rows, vocabulary], on the host.
        totals: float32 [rows], cumulative log-probabilities of the rows.
        count: Fewer are returned if there are not as many of a probability above 0.
        rules: They come before the choice; None if there are none.
    """
    blocks, logprobs = blocks_of(logits, rules)
    maxima = blocks.maxima.numpy()
    maxima += totals[:, None]
    bound = _bound(maxima.ravel(), count)
    rows, numbers = np.divmod(np.flatnonzero(maxima >= bound), maxima.shape[1])
    keys = blocks.at(torch.from_numpy(rows), torch.from_numpy(numbers)).numpy()
    scores = keys + totals[rows, None]
    chosen = np.flatnonzero(scores >= bound)
    scores = scores.ravel()[chosen]
    kept = scores >= _bound(scores, count)
    chosen, scores = chosen[kept], scores[kept]
    keys = keys.ravel()[chosen]
    block, token = np.divmod(chosen, blocks.size)
    rows, token_ids = rows[block], numbers[block] * blocks.size + token
    order = np.lexsort((token_ids, -keys, rows))
    if len(order) > count:  # ties at the bound
        best = np.argsort(-scores[order], kind="stable")[:count]
        order = order[np.sort(best)]
    rows, token_ids = rows[order], token_ids[order]
    if logprobs is None:
        return Candidates(rows, token_ids, keys[order])
    values = logprobs[torch.from_numpy(rows), torch.from_numpy(token_ids)]
    return Candidates(rows, token_ids, values.numpy())


def _bound(scores: np.ndarray, count: int) -> np.float32:
    """Return the `count`-th largest score, or what all finite ones reach; makes others finite."""
    np.fmax(scores, _LEAST, out=scores)
    if count >= len(scores):
        return _LEAST
    best = torch.from_numpy(scores).topk(count, sorted=False).values
    return np.float32(best.min().item())


def launch_draws(
    logits: torch.Tensor,
    totals: np.ndarray,
    count: int,
    rules: TokenRules | None,
    draws: Draws,
) -> Unfetched[Candidates]:
    """Draw `count` continuations without replacement, out of all rows together.

    The ``k`` largest of log-probability plus Gumbel noise are ``k`` draws without replacement (Kool
    et al., "Stochastic Beams and Where to Find Them"). Those that may not follow have a key of
    ``-inf``.

    Args:
        logits: float [rows, vocabulary].
        totals: float32 [rows], sums of the rows' divided log-probabilities.
        count: At most as many.
        rules: They come before the draw; None if there are none.
        draws: How to draw.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    scores = (logprobs if rules is None else rules.apply(logprobs)) / draws.temperature
    scores += to_device(totals, logits.device)[:, None]
    generator = torch.Generator(logits.device).manual_seed(draws.seed)
    noise = torch.empty_like(scores).exponential_(generator=generator).clamp_min_(_TINY).log_()
    scores = (scores - noise).masked_fill_(logprobs.isnan(), -torch.inf).flatten()
    keys, indices = scores.topk(min(count, len(scores)))
    finish = functools.partial(_by_row, vocab_size=logits.shape[1])
    return Unfetched((indices, logprobs.flatten()[indices], keys), finish)


def _by_row(
    indices: np.ndarray, logprobs: np.ndarray, keys: np.ndarray, vocab_size: int
) -> Candidates:
    rows, token_ids = np.divmod(indices, vocab_size)
    order = np.lexsort((-logprobs, rows))
    return Candidates(rows[order], token_ids[order], logprobs[order], keys[order])
