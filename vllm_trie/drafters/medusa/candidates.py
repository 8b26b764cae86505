"""The likeliest tokens of each head: the step from the heads' logits to the choice of a tree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_trie.drafters.medusa import native


class HeadLogits(NamedTuple):
    """Logits of the heads, and how to read them."""

    data: Tensor
    """[K, rows, num_outputs] in any float dtype, the last dimension contiguous."""
    temperatures: Tensor
    """float32 [K], positive, on the same device: what calibrates each head's probabilities."""
    token_map: Tensor | None
    """int64 [num_outputs] on the same device, the token of each output, all different; None if they
    are the same."""
    num_candidates: int
    """m, tokens to take from each head, likeliest first; all if it has fewer."""


def top_candidates(logits: HeadLogits) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidates of each head and their probabilities.

    Candidates have probability 0, so that no tree takes them, where a head's logits have no softmax
    (NaN or infinity among them). On a CPU this is one native call; torch's operations would cost
    more than the rest of the choice of a tree.

    Returns:
        Tokens int32 and probabilities float32, both [rows, K, num_candidates], contiguous.
    """
    if native.reads(logits.data.device, logits.data.dtype):
        return native.top_candidates(logits)
    return top_candidates_torch(logits)


def top_candidates_torch(logits: HeadLogits) -> tuple[np.ndarray, np.ndarray]:
    """Compute the same with torch, for any device and dtype: the twin of core/candidates.cpp."""
    data = logits.data.float().transpose(0, 1)
    values, outputs = data.topk(min(logits.num_candidates, data.shape[-1]), dim=-1)
    scale = 1.0 / logits.temperatures[None, :, None]
    total = torch.logsumexp(data * scale, dim=-1, keepdim=True)
    probabilities = torch.exp(values * scale - total).nan_to_num_(nan=0.0).clamp_(max=1.0)
    tokens = outputs if logits.token_map is None else logits.token_map[outputs]
    return (
        np.ascontiguousarray(tokens.to(torch.int32).cpu().numpy()),
        np.ascontiguousarray(probabilities.cpu().numpy()),
    )
