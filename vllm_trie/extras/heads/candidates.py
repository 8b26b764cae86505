"""The likeliest tokens of each head: the step from the heads' logits to the choice of a tree."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vllm_trie.drafts.ngrams import Blend, Candidates, Source

_TEXT = Source(concentration=0.2, discount=0.7)
BLEND = Blend(own=_TEXT, shared=_TEXT, shared_long=_TEXT, min_left_for_heads=1e-6, min_order=1)
"""The blend of the text's n-grams with the heads, as fitted on the shipped model: what is frequent
in general, the heads know better, so the shortest context is one token."""


def top_candidates(
    logits: Tensor, temperatures: Tensor, token_map: Tensor | None, num_candidates: int
) -> Candidates:
    """Return the candidates of each head, [rows, K, num_candidates], the likeliest first.

    Candidates have probability 0, so that no tree takes them, where a head's logits have no softmax
    (NaN or infinity among them).

    Args:
        logits: [K, rows, num_outputs] in any float dtype.
        temperatures: float32 [K], positive: what calibrates each head's probabilities.
        token_map: int64 [num_outputs], the token of each output, all different; None if they are
            the same.
        num_candidates: m, tokens to take from each head; all if it has fewer.
    """
    data = logits.float().transpose(0, 1)
    values, outputs = data.topk(min(num_candidates, data.shape[-1]), dim=-1)
    scale = 1.0 / temperatures[None, :, None]
    total = (data * scale).logsumexp(dim=-1, keepdim=True)
    probabilities = (values * scale - total).exp().nan_to_num_(nan=0.0).clamp_(max=1.0)
    tokens = outputs if token_map is None else token_map[outputs]
    return Candidates(
        np.ascontiguousarray(tokens.int().cpu().numpy()),
        np.ascontiguousarray(probabilities.cpu().numpy()),
    )
