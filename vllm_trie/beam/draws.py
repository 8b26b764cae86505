"""Draws without replacement among the continuations of all hypotheses together.

The ``k`` largest of log-probability plus Gumbel noise are ``k`` draws without replacement (Kool et
al., "Stochastic Beams and Where to Find Them"). Only they leave the device.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from vllm_trie.beam.blocks import TokenRules
from vllm_trie.beam.candidates import Candidates, Draws
from vllm_trie.beam.unfetched import Unfetched
from vllm_trie.device_copy import to_device

_TINY = torch.finfo(torch.float32).tiny


def launch_draws(
    logits: torch.Tensor,
    totals: np.ndarray,
    count: int,
    rules: TokenRules | None,
    draws: Draws,
) -> Unfetched[Candidates]:
    """Draw `count` continuations; those that may not follow have an infinite key.

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
    keys, places = scores.topk(min(count, len(scores)))
    finish = functools.partial(_by_row, vocab_size=logits.shape[1])
    return Unfetched((places, logprobs.flatten()[places], keys), finish)


def _by_row(
    places: np.ndarray, logprobs: np.ndarray, keys: np.ndarray, vocab_size: int
) -> Candidates:
    rows, token_ids = np.divmod(places, vocab_size)
    order = np.lexsort((-logprobs, rows))
    return Candidates(rows[order], token_ids[order], logprobs[order], keys[order])
