"""A model of real size whose greedy output is a recorded answer; for benchmarks only.

The class is vLLM's Llama with dummy weights: all layers, the attention and the projection to the
vocabulary are computed as for a trained model of that shape. Then the logits of each row get a new
maximum: the recorded token that follows the row's position. A step costs what a step of such a
model costs, and the text is a real model's.

The request and the position identify a row, so the model is told which requests a step's rows
belong to. A row whose token is not the recorded one of its position is off the recorded path. It
gets another token, so a drafter learns nothing from it. Texts and owners lie in memory that does
not move: CUDA graphs read them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

ARCHITECTURE = "ReplayLlamaForCausalLM"
SHAPES: dict[str, dict[str, int]] = {
    # In millions: weights of the layers + of the projection to the vocabulary, 32,000 tokens.
    "tiny": {  # for tests
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
    },
    "0.4b": {  # 377 + 33
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 4096,
    },
    "8b": {  # 6,980 + 525, of 128,256 tokens: Llama 3 8B
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
}
MAX_TEXTS, MAX_LENGTH = 1024, 1 << 13
"""Texts at a time, and tokens of the longest."""
_DIGIT = 256
"""Integers up to here are exact in bfloat16: a token id travels as two digits."""
_TOP = 1.0e4


class Recorded:
    """Texts of the running requests, shared by all replay models of this process."""

    texts: ClassVar[torch.Tensor] = torch.zeros((MAX_TEXTS, MAX_LENGTH), dtype=torch.int64)
    """On the models' device; behind the end of a text its last token repeats."""

    @classmethod
    def play(cls, texts: Sequence[Sequence[int]]) -> None:
        """Make `texts`, each prompt and answer, those of the next requests."""
        rows = np.array([[*text, *[text[-1]] * (MAX_LENGTH - len(text))] for text in texts])
        cls.texts[: len(texts)].copy_(torch.from_numpy(rows))

    @classmethod
    def move_to(cls, device: torch.device) -> None:
        """Keep the texts on this device."""
        with torch.inference_mode(False):  # `play` writes outside of it
            cls.texts = cls.texts.to(device)


def next_tokens(
    recorded: torch.Tensor,
    owners: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return the token after each row: int64 [rows].

    Args:
        recorded: int64 [texts, length], as :attr:`Recorded.texts`.
        owners: int64 [rows], the text of each row.
        input_ids: int [rows], the rows' tokens.
        positions: int [rows], the rows' positions.
        vocab_size: token ids are below.
    """
    last = recorded.shape[1] - 1
    positions = positions.to(torch.int64)
    follows = recorded[owners, (positions + 1).clamp(max=last)]
    on_path = input_ids == recorded[owners, positions.clamp(max=last)]
    elsewhere = (follows + 1 + (31 * input_ids + positions) % (vocab_size - 1)) % vocab_size
    return torch.where(on_path, follows, elsewhere)


def write_digits(hidden_states: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write token ids below 65,536 into the hidden states [rows, hidden_size], in place."""
    hidden_states[:, 0] = tokens // _DIGIT
    hidden_states[:, 1] = tokens % _DIGIT


def read_digits(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the token ids that `write_digits` wrote: int64 [rows]."""
    digits = hidden_states[:, :2].to(torch.int64)
    return digits[:, 0] * _DIGIT + digits[:, 1]


class ReplayLlamaForCausalLM(LlamaForCausalLM):
    """vLLM's Llama, whose argmax is the recorded text."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        device = next(self.parameters()).device
        Recorded.move_to(device)
        self._vocab_size = min(self.config.vocab_size, _DIGIT * _DIGIT)
        num_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._owners = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def set_owners(self, texts: Sequence[int], num_rows: np.ndarray) -> None:
        """Say whose the rows of the next step are: the text and the number of rows of each request.

        Rows behind them are padding.
        """
        owners = torch.from_numpy(np.repeat(np.array(texts, dtype=np.int64), num_rows))
        if self._owners.is_cuda:
            owners = owners.pin_memory()
        self._owners[: len(owners)].copy_(owners, non_blocking=True)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden_states = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        owners = self._owners[: len(input_ids)]
        tokens = next_tokens(Recorded.texts, owners, input_ids, positions, self._vocab_size)
        write_digits(hidden_states, tokens)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits.scatter_(1, read_digits(hidden_states).unsqueeze(1), _TOP)


def register() -> None:
    """Register the class with vLLM, in this process."""
    ModelRegistry.register_model(ARCHITECTURE, ReplayLlamaForCausalLM)


def write_config(folder: Path, shape: str, vocab_size: int) -> str:
    """Write the model's config.json; return the folder as vLLM's `model`.

    Args:
        folder: an existing folder.
        shape: a key of `SHAPES`.
        vocab_size: of the tokenizer that the recorded text was encoded with.
    """
    sizes = SHAPES[shape]
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": vocab_size,  # unless the shape has a larger one
        "max_position_embeddings": MAX_LENGTH,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return str(folder)
