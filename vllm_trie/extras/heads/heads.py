"""The Medusa heads themselves: residual blocks and an output layer for each future position.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads" (2024), section 2.1.1: p_k = softmax(W2_k · (SiLU(W1_k · h) + h)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadsShape:
    """Shape of a set of heads.

    Attributes:
        num_heads: K; head k guesses the token k + 2 places after the hidden state's own token.
        num_layers: Residual blocks of each head.
        hidden_size: Width of the target model's hidden states.
        vocab_size: Tokens of the target model.
        num_outputs: Tokens that the heads can guess; fewer than `vocab_size` with a token map.
        has_bias: Whether the residual blocks have a bias.
        shares_output: All heads use one output layer.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_outputs: int
    has_bias: bool = False
    shares_output: bool = False


class MedusaHeads(nn.Module):
    """K heads whose weights are stacked, so that a batch takes one matrix product a layer.

    Attributes:
        block_weight: [K, num_layers, hidden_size, hidden_size].
        block_bias: [K, num_layers, hidden_size] or None.
        output_weight: [K, num_outputs, hidden_size]; [1, ...] if the heads share it.
        token_map: int64 [num_outputs], the token of each output, or None if they are the same.
    """

    block_bias: nn.Parameter | None
    token_map: Tensor | None

    def __init__(self, shape: HeadsShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        blocks = (shape.num_heads, shape.num_layers, shape.hidden_size)
        # Zero weights make a block the identity, as the heads start in the paper.
        self.block_weight = nn.Parameter(torch.zeros(*blocks, shape.hidden_size, dtype=dtype))
        bias = nn.Parameter(torch.zeros(*blocks, dtype=dtype)) if shape.has_bias else None
        self.register_parameter("block_bias", bias)
        outputs = 1 if shape.shares_output else shape.num_heads
        self.output_weight = nn.Parameter(
            torch.zeros(outputs, shape.num_outputs, shape.hidden_size, dtype=dtype)
        )
        self.register_buffer("token_map", None)

    def forward(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Return logits [K, rows, num_outputs] of the first `num_heads` heads; `hidden` is
        [rows, hidden_size]."""
        count = num_heads or self.shape.num_heads
        x = hidden.expand(count, *hidden.shape)
        for layer in range(self.shape.num_layers):
            weight = self.block_weight[:count, layer]
            y = torch.bmm(x, weight.transpose(1, 2))
            if self.block_bias is not None:
                y = y + self.block_bias[:count, layer, None]
            x = x + F.silu(y)
        if self.shape.shares_output:
            return F.linear(x, self.output_weight[0])
        return torch.bmm(x, self.output_weight[:count].transpose(1, 2))

    def head(self, index: int, hidden: Tensor) -> Tensor:
        """Return logits [rows, num_outputs] of one head, in the dtype of `hidden`."""
        x = hidden
        for layer in range(self.shape.num_layers):
            bias = None
            if self.block_bias is not None:
                bias = self.block_bias[index, layer].to(x.dtype)
            x = x + F.silu(F.linear(x, self.block_weight[index, layer].to(x.dtype), bias))
        output = self.output_weight[0 if self.shape.shares_output else index]
        return F.linear(x, output.to(x.dtype))
