"""The best continuations of many hypotheses, out of all rows and tokens together.

A step of a search of width ``b`` needs about ``2 * b`` continuations in all. The best ``2 * b`` of
every row would be hundreds of times as many, and sorting ``rows * vocabulary`` scores costs more
still for large vocabularies. The selection here reads the scores once, for the largest of each
block of neighbouring tokens::

    row 0   [ block max | block max | ... ]     the k-th largest of all maxima is a bound:
    row 1   [ block max | block max | ... ]     k scores reach it, so the best k do, too

Only blocks that reach the bound are looked into: about k of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.beam.candidates import Candidates

BLOCK = 64
"""Tokens of a block."""


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
        logits: float[rows, vocabulary].
        totals: float32[rows], cumulative log-probabilities of the rows.
        count: Fewer are returned if there are not as many of a probability above 0.
        rules: They come before the choice; None if there are none.
        rows_of_logits: int [rows], the row of the search that each row of logits belongs to, which
            saves a copy of them in order; None if they are in order. Not with rules.
    """
    num_rows, vocab_size = logits.shape
    if rows_of_logits is not None:
        assert rules is None
        totals = totals[rows_of_logits]
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    ranked = logprobs if rules is None else rules.apply(logprobs)
    if padding := -vocab_size % BLOCK:
        ranked = torch.nn.functional.pad(ranked, (0, padding), value=-torch.inf)
    blocks = ranked.view(-1, BLOCK)
    blocks_per_row = len(blocks) // num_rows
    offsets = torch.from_numpy(totals).to(logits.device, torch.float32)
    offsets = offsets.repeat_interleave(blocks_per_row)
    largest = (blocks.amax(dim=-1) + offsets).nan_to_num_(nan=-torch.inf)
    bound = largest.topk(min(count, len(blocks)), sorted=False).values.min()
    chosen = ((largest >= bound) & (largest > -torch.inf)).nonzero()[:, 0]
    scores = (blocks[chosen] + offsets[chosen, None]).view(-1)
    if count < len(scores):
        bound = scores.topk(count, sorted=False).values.min()
        places = ((scores >= bound) & (scores > -torch.inf)).nonzero()[:, 0]
    else:
        places = (scores > -torch.inf).nonzero()[:, 0]
    flat = chosen[places // BLOCK] * BLOCK + places % BLOCK
    keys = blocks.view(-1)[flat].cpu().numpy()
    rows, token_ids = np.divmod(flat.cpu().numpy(), blocks_per_row * BLOCK)
    if rows_of_logits is not None:
        rows = rows_of_logits[rows]
    order = np.lexsort((token_ids, -keys, rows))
    if len(order) > count:  # ties at the bound
        best = np.argsort(-scores[places].cpu().numpy()[order], kind="stable")[:count]
        order = order[np.sort(best)]
    rows, token_ids = rows[order], token_ids[order]
    if rules is None:
        return Candidates(rows, token_ids, keys[order])
    places = torch.from_numpy(np.stack([rows, token_ids])).to(logprobs.device)
    return Candidates(rows, token_ids, logprobs[places[0], places[1]].cpu().numpy())
