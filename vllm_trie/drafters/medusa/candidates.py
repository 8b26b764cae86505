"""The likeliest tokens of each head: the step from the heads' logits to the choice of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_trie.drafters.medusa import native


def top_candidates(logits: Tensor, num_tokens: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The `num_tokens` likeliest outputs of each head, likeliest first, all if it has fewer.

    On a CPU this is one native call; torch's operations, which take the vocabulary apart several
    times, would cost more than everything else in the choice of a tree.

    Args:
        logits: [K, rows, num_outputs] in any float dtype.
        temperatures: float32 [K], positive, what calibrates each head's probabilities.

    Returns:
        Outputs int32 and probabilities float32, both [rows, K, num_tokens].
    """
    found = native.top_candidates(logits, num_tokens, temperatures)
    return found or top_candidates_torch(logits, num_tokens, temperatures)


def top_candidates_torch(
    logits: Tensor, num_tokens: int, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """The readable twin of core/candidates.cpp, with the same arguments, for any device."""
    logits = logits.float().transpose(0, 1)
    values, outputs = logits.topk(min(num_tokens, logits.shape[-1]), dim=-1)
    scale = 1.0 / temperatures[None, :, None]
    total = torch.logsumexp(logits * scale, dim=-1, keepdim=True)
    probabilities = torch.exp(values * scale - total).clamp_(max=1.0)
    return outputs.to(torch.int32), probabilities
