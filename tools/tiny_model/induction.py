"""Attention heads set by hand, so that copying need not be discovered by gradient descent.

A model this small finds the two-layer circuit of "In-context Learning and Induction Heads"
(Olsson et al. 2022) only after many more tokens than it is given here. Layer 0, head 0 starts as
a head that attends to the previous token and writes that token into a subspace; layer 1, head 0
starts as a head that looks for the position whose *previous* token is the present one, and points
at the token there. Nothing is frozen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tools.tiny_model.model import TinyLlama

_CONSTANT_CHANNEL = 0
_CONSTANT = 0.15
_PREVIOUS_TOKEN_GAP = 4.0
"""By how much the previous token's attention score leads, before the softmax."""
_MATCH_GAIN = 1.2


def _subspace(size: int, dimensions: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns ``[size, dimensions]``, zero on the constant channel."""
    basis, _ = torch.linalg.qr(torch.randn(size, dimensions, generator=generator))
    basis[_CONSTANT_CHANNEL] = 0
    return basis


@torch.no_grad()
def set_induction_heads(model: TinyLlama, strength: float = 0.5, seed: int = 0) -> None:
    """Overwrite head 0 of layers 0 and 1 of a fresh ``model`` in place.

    Args:
        strength: how hard the second head points at the token to copy; 0 leaves it silent.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    hidden, size = config.hidden_size, config.head_size
    embedding_std = 0.02
    model.embed_tokens[:, _CONSTANT_CHANNEL] = _CONSTANT
    mean_square = (embedding_std**2 * (hidden - 1) + _CONSTANT**2) / hidden
    constant = _CONSTANT / math.sqrt(mean_square)  # after the layer's norm
    frequencies = config.rope_theta ** (-torch.arange(0, size, 2).float() / size)

    # Previous token: queries constant, keys the same turned by one position, on fast pairs only.
    fast = (frequencies > 0.04).float()
    spread = float((fast * (1 - frequencies.cos())).sum())
    gain = math.sqrt(_PREVIOUS_TOKEN_GAP * math.sqrt(size) / spread) / constant
    first = model.layers[0].self_attn
    for projection, angle in (
        (first.q_proj, torch.zeros_like(frequencies)),
        (first.k_proj, frequencies),
    ):
        projection.weight[:size] *= 0.2
        projection.weight[:size, _CONSTANT_CHANNEL] = gain * torch.cat(
            (fast * angle.cos(), fast * angle.sin())
        )
    token = _subspace(hidden, size, generator)
    previous = _subspace(hidden, size, generator)
    first.v_proj.weight[:size] = token.T
    first.o_proj.weight[:, :size] = 0.03 * previous

    # Match: this token against each position's previous token, on pairs too slow to see distance.
    second = model.layers[1].self_attn
    slow = (frequencies < 2e-3).repeat(2)[:, None]
    for projection, basis in ((second.q_proj, token), (second.k_proj, previous)):
        weight = projection.weight[:size]
        projection.weight[:size] = torch.where(slow, _MATCH_GAIN * basis.T, 0.2 * weight)
    copied = _subspace(hidden, size, generator)
    second.v_proj.weight[:size] = copied.T
    second.o_proj.weight[:, :size] = strength * embedding_std * copied
