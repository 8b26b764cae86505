"""How a layer's attention differs from full causal attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionKind(NamedTuple):
    """A layer's attention; full and causal by default.

    Scores are scaled, capped, and biased, in this order. A query and a key have positions in the
    text; a node's position follows its depth, not its slot.

    Attributes:
        window: A query at position p sees keys from p - window + 1 on; 0 is no window.
        chunk: It sees keys from the last multiple of this on, up to p; 0 is no chunks.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 is no cap.
        sinks: float32 [num_heads], a score of each query head that takes part in the softmax and
            has no value (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
            2024).
        alibi_slopes: float32 [num_heads]: the slope times the distance, which is not positive, from
            the query's position to the key's is added to the score (Press et al., "Train Short,
            Test Long", 2022).
    """

    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def is_partial(self) -> bool:
        """Whether queries do not see all keys before them."""
        return bool(self.window or self.chunk)


FULL_ATTENTION = AttentionKind()
