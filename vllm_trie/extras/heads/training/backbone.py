"""The frozen model whose hidden states the heads read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_trie.extras.heads.training.text import Encoder


class Backbone:
    """A Hugging Face causal language model, used for its last hidden states alone.

    Attributes:
        decoder: The model without its output layer.
        output_weight: float32 [vocab_size, hidden_size], the model's own output layer.
    """

    def __init__(self, path: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.decoder = model.get_decoder().to(device).eval().requires_grad_(False)
        output = model.get_output_embeddings()
        if output is None or output.weight.ndim != 2:
            raise ValueError(f"the model {path!r} has no output layer that heads could start from")
        self.output_weight = output.weight.detach().float().to(device)
        self.path, self.device, self.dtype = path, torch.device(device), dtype
        self.vocab_size, self.hidden_size = self.output_weight.shape
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.eos_token_id: int | None = model.config.eos_token_id
        if isinstance(self.eos_token_id, list):
            self.eos_token_id = self.eos_token_id[0]
        self.max_length: int | None = getattr(model.config, "max_position_embeddings", None)

    @property
    def encoder(self) -> Encoder:
        """Return the tokenizer's, for texts that may be longer than the model's context."""
        return Encoder(self._encode, self._encode_question, self.eos_token_id, self.vocab_size)

    def _encode(self, text: str) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return list(encoded.input_ids)

    def _encode_question(self, question: str) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the data has a 'question', but the model {self.path!r} has no chat template; "
                "give lines with 'text' or 'token_ids' alone"
            )
        chat: Any = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        return list(chat)

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Return the last hidden states, which the output layer reads: [rows, tokens,
        hidden_size]."""
        hidden: Tensor = self.decoder(token_ids.to(self.device), use_cache=False).last_hidden_state
        return hidden

    @torch.inference_mode()
    def predictions(self, hidden: Tensor) -> Tensor:
        """Return the model's own likeliest next token at each place, int64 [rows, tokens]."""
        weight = self.output_weight.to(hidden.dtype)
        return torch.stack([torch.argmax(row @ weight.T, dim=-1) for row in hidden])
