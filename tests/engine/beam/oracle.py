"""Hugging Face's ``generate(num_beams=b)``, and a model whose hypotheses end early."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_trie.lab.tiny_model import model_path


class Expected(NamedTuple):
    """A hypothesis of the oracle; no score at width 1, where the oracle decodes greedily."""

    token_ids: list[int]
    score: float | None


class Case(NamedTuple):
    """One search: what both sides are asked for."""

    prompt_token_ids: tuple[int, ...]
    beam_width: int
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    max_tokens: int = 16
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0


def make_eos_heavy_model(folder: Path, token_ids: list[int], margin: float = 1.5) -> Path:
    """The shipped model with an EOS whose logit is about the largest one less `margin`.

    The output row of EOS is fitted to that by least squares on the hidden states of `token_ids`.
    """
    source = model_path()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(source) / name, folder / name)
    config = AutoConfig.from_pretrained(source)
    config.tie_word_embeddings = False
    config.save_pretrained(folder)
    weights = load_file(Path(source) / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    with torch.no_grad():
        model = load(str(source))
        hidden = model.model(torch.tensor(token_ids).view(-1, 64)).last_hidden_state
        target = model.lm_head(hidden).max(dim=-1).values - margin
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1, 1)
    head[config.eos_token_id] = torch.linalg.lstsq(hidden, target).solution[:, 0]
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.lru_cache(maxsize=2)
def load(path: str) -> Any:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@functools.cache
def search(path: str, case: Case) -> list[Expected]:
    """What the oracle finds, best first."""
    model = load(path)
    prompt = torch.tensor([case.prompt_token_ids])
    eos = model.config.eos_token_id
    options: dict[str, Any] = {}
    if case.beam_width > 1:
        options["early_stopping"] = case.early_stopping
        options["length_penalty"] = case.length_penalty
    if case.repetition_penalty != 1.0:
        options["repetition_penalty"] = case.repetition_penalty
    if case.no_repeat_ngram_size:
        options["no_repeat_ngram_size"] = case.no_repeat_ngram_size
    if case.min_tokens:
        options["min_new_tokens"] = case.min_tokens
    return hypotheses_of(
        model,
        prompt,
        num_beams=case.beam_width,
        max_new_tokens=case.max_tokens,
        eos_token_id=[eos, *case.stop_token_ids],
        **options,
    )


def hypotheses_of(
    model: Any, input_ids: torch.Tensor, num_beams: int, **options: Any
) -> list[Expected]:
    """The hypotheses, best first; one beam has no score."""
    pad = model.config.get_text_config().vocab_size - 1
    with torch.no_grad():
        result = model.generate(
            input_ids=input_ids,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_scores=True,
            **{"attention_mask": torch.ones_like(input_ids), **options},
        )
    hypotheses = []
    for i, sequence in enumerate(result.sequences[:, input_ids.shape[1] :].tolist()):
        while sequence and sequence[-1] == pad:
            sequence.pop()
        score = float(result.sequences_scores[i]) if num_beams > 1 else None
        hypotheses.append(Expected(sequence, score))
    return hypotheses


def constrained_search(
    path: str,
    prompt_token_ids: Sequence[int],
    beam_width: int,
    max_tokens: int,
    allowed: Callable[[tuple[int, ...]], list[int]],
    eos: int | None,
    early_stopping: bool | str = False,
    **options: Any,
) -> list[Expected]:
    """What the oracle finds with ``prefix_allowed_tokens_fn``, best first; valid paths only.

    Args:
        allowed: From generated tokens to those that may follow.
        eos: Token that ends a hypothesis; None if only the length does.
        options: Further ones of ``generate``.
    """
    model = load(path)
    prompt = torch.tensor([prompt_token_ids])
    pad = model.config.vocab_size - 1

    def allowed_tokens(_: int, token_ids: torch.Tensor) -> list[int]:
        # Beams of probability 0 may be anywhere; Hugging Face wants some token for them, too.
        return allowed(tuple(token_ids[prompt.shape[1] :].tolist())) or [pad]

    hypotheses = hypotheses_of(
        model,
        prompt,
        num_beams=beam_width,
        max_new_tokens=max_tokens,
        eos_token_id=[pad if eos is None else eos],
        early_stopping=early_stopping,
        prefix_allowed_tokens_fn=allowed_tokens,
        **options,
    )
    return [hypothesis for hypothesis in hypotheses if hypothesis.score > -1e6]
