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

BLOCK = 64
"""Tokens of a block."""


class Selection(NamedTuple):
    """Continuations of rows, by row, best first within a row.

    Attributes:
        rows: int64[c].
        token_ids: int64[c].
        logprobs: float32[c], log-probabilities of the tokens.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


def select_best(logits: torch.Tensor, totals: np.ndarray, count: int) -> Selection:
    """Return the `count` best continuations of all rows together.

    A tie goes to the earlier row, then to the better token, then to the smaller one. Rows with a
    NaN have no continuations. The scores are float32 sums, as in Hugging Face's ``generate``.

    Args:
        logits: float[rows, vocabulary].
        totals: float32[rows], cumulative log-probabilities of the rows.
        count: Fewer are returned if there are not as many of a probability above 0.
    """
    num_rows, vocab_size = logits.shape
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    if padding := -vocab_size % BLOCK:
        logprobs = torch.nn.functional.pad(logprobs, (0, padding), value=-torch.inf)
    blocks = logprobs.view(-1, BLOCK)
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
    values = blocks.view(-1)[flat].cpu().numpy()
    rows, token_ids = np.divmod(flat.cpu().numpy(), blocks_per_row * BLOCK)
    order = np.lexsort((token_ids, -values, rows))
    if len(order) > count:  # ties at the bound
        best = np.argsort(-scores[places].cpu().numpy()[order], kind="stable")[:count]
        order = order[np.sort(best)]
    return Selection(rows[order], token_ids[order], values[order])
