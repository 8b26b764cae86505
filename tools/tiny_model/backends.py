"""The engines that the evaluation decodes with, behind one small interface."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.tiny_model.data.tokenizer import END_ID
from tools.tiny_model.decoding import greedy
from tools.tiny_model.model import load_model

Tokens = Sequence[int]


class Backend(ABC):
    """Greedy decoding of one model folder."""

    @abstractmethod
    def generate(self, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        """New tokens of each prompt, up to and without END."""


class TrainingBackend(Backend):
    """The training-side model, float32."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)

    def generate(self, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        return [greedy(self.model, [prompt], max_tokens)[0] for prompt in prompts]


class TransformersBackend(Backend):
    """Hugging Face ``generate``, one prompt at a time (padding would change the arithmetic)."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(self, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        return [self._run(prompt, max_tokens)[0] for prompt in prompts]

    def beams(self, prompt: Tokens, width: int, max_tokens: int) -> list[list[int]]:
        """All ``width`` hypotheses of one prompt, best first."""
        return self._run(prompt, max_tokens, num_beams=width, num_return_sequences=width)

    def _run(self, prompt: Tokens, max_tokens: int, **options: int) -> list[list[int]]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            rows = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                **options,
            )
        outputs = [row[len(prompt) :].tolist() for row in rows]
        return [row[: row.index(END_ID)] if END_ID in row else row for row in outputs]


class VllmBackend(Backend):
    """An in-process vLLM engine without this project's plugin in the way."""

    def __init__(self, folder: Path, dtype: str, max_model_len: int = 2048) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_PLUGINS", "")
        from vllm import LLM, SamplingParams

        self._parameters = SamplingParams
        self.engine = LLM(
            str(folder),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=256 << 20,
        )

    def generate(self, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        parameters = self._parameters(temperature=0.0, max_tokens=max_tokens)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.engine.generate(requests, parameters, use_tqdm=False)
        rows = [list(output.outputs[0].token_ids) for output in outputs]
        return [row[:-1] if row and row[-1] == END_ID else row for row in rows]


def make_backend(name: str, folder: Path, dtype: str) -> Backend:
    """``name`` is "training" (float32 only), "transformers" or "vllm"."""
    if name == "training":
        return TrainingBackend(folder)
    if name == "transformers":
        return TransformersBackend(folder, dtype)
    if name == "vllm":
        return VllmBackend(folder, dtype)
    raise ValueError(f"backend={name!r}: choose training, transformers or vllm")
