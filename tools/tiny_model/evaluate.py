"""Judge a trained model: ``python -m tools.tiny_model.evaluate --backend vllm``."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tokenizers import Tokenizer

from tools.tiny_model.backends import Backend, TransformersBackend, make_backend
from tools.tiny_model.data.corpus import load_corpus
from tools.tiny_model.data.dataset import encode_documents, encode_files
from tools.tiny_model.data.documents import (
    EXACT_KINDS,
    Document,
    DocumentMaker,
    usable_names,
)
from tools.tiny_model.data.tokenizer import END, load_tokenizer
from tools.tiny_model.decoding import find_loop, ngram_steps
from tools.tiny_model.losses import held_out_losses
from tools.tiny_model.model import TinyLlama, load_model
from tools.tiny_model.prompts import HAND_PROMPTS
from vllm_trie.lab.tiny_model import model_path

_NEAR_TIE = 1e-3
"""Two leading logits closer than this may swap places between two float32 implementations."""


@dataclass(frozen=True)
class Answer:
    """What the model said to one prompt, and what that says about the model."""

    name: str
    prompt: list[int]
    output: list[int]
    ended: bool

    @property
    def loops(self) -> bool:
        return find_loop(self.output) is not None

    @property
    def tokens_per_step(self) -> float:
        return ngram_steps(self.prompt, self.output).tokens_per_step if self.output else 1.0


def ask(
    backend: Backend, tokenizer: Tokenizer, named: Sequence[tuple[str, str]], max_tokens: int
) -> list[Answer]:
    """Decode ``(name, prompt text)`` pairs greedily."""
    prompts = [tokenizer.encode(text).ids for _, text in named]
    outputs = backend.generate(prompts, max_tokens)
    return [
        Answer(name, prompt, output, len(output) < max_tokens)
        for (name, _), prompt, output in zip(named, prompts, outputs, strict=True)
    ]


def held_out_documents(count: int, max_chars: int = 750, seed: int = 1) -> list[Document]:
    """Task documents from modules that training never saw, ``count`` of each exact kind."""
    corpus, rng = load_corpus(), random.Random(seed)
    maker = DocumentMaker(corpus.held_out, usable_names(corpus.train))
    return [maker.make(rng, max_chars, kind) for kind in sorted(EXACT_KINDS) for _ in range(count)]


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """Loops, natural ends and tokens per step over a set of answers."""
    steps = [answer.tokens_per_step for answer in answers]
    return {
        "prompts": len(answers),
        "loops": sum(answer.loops for answer in answers),
        "ended": sum(answer.ended for answer in answers),
        "tokens_per_step": round(float(np.mean(steps)), 2),
        "tokens_per_step_min": round(min(steps), 2),
        "tokens_per_step_max": round(max(steps), 2),
    }


@torch.no_grad()
def near_ties(model: TinyLlama, answers: Sequence[Answer]) -> dict[str, float]:
    """How often the two leading logits on a greedy path nearly tie (in nats, float32)."""
    margins = []
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.output])
        hidden = model.hidden(ids, *model.rotary(ids.shape[1]))
        top = model.logits(hidden[0, len(answer.prompt) - 1 :]).topk(2).values
        margins.append(top[:, 0] - top[:, 1])
    every = torch.cat(margins)
    return {
        "positions": len(every),
        "near_ties": int((every < _NEAR_TIE).sum()),
        "smallest_margin": round(float(every.min()), 6),
    }


def exact_by_kind(
    answers: Sequence[Answer], documents: Sequence[Document], tokenizer: Tokenizer
) -> dict[str, float]:
    """Share of answers that equal the expected text, per kind and over all."""
    right: dict[str, list[bool]] = {}
    for answer, document in zip(answers, documents, strict=True):
        same = tokenizer.decode(answer.output) == document.answer.removesuffix(END)
        right.setdefault(document.kind, []).append(same)
    shares = {kind: round(float(np.mean(values)), 2) for kind, values in sorted(right.items())}
    every = [same for values in right.values() for same in values]
    return {"all": round(float(np.mean(every)), 3), **shares}


def beam_variety(backend: TransformersBackend, answers: Sequence[Answer]) -> dict[str, float]:
    """How far the four hypotheses of a beam search lie apart."""
    distinct, differing = [], []
    for answer in answers:
        hypotheses = backend.beams(answer.prompt, width=4, max_tokens=64)
        distinct.append(len({tuple(row) for row in hypotheses}))
        best = hypotheses[0]
        for other in hypotheses[1:]:
            same = next(
                (i for i, (a, b) in enumerate(zip(best, other, strict=False)) if a != b),
                min(len(best), len(other)),
            )
            differing.append(1 - same / max(1, len(best), len(other)))
    return {
        "distinct_of_4": round(float(np.mean(distinct)), 2),
        "differing_tail": round(float(np.mean(differing)), 2),
    }


def main(
    model: Annotated[Path | None, typer.Option(help="folder; the shipped model")] = None,
    backend: Annotated[str, typer.Option(help="training, transformers or vllm")] = "training",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    threads: Annotated[int, typer.Option(help="torch threads")] = 1,
    per_kind: Annotated[int, typer.Option(help="held-out documents of each kind")] = 10,
    max_tokens: Annotated[int, typer.Option(help="for hand-written prompts")] = 200,
    show: Annotated[bool, typer.Option(help="print the answers to hand-written prompts")] = False,
    losses: Annotated[bool, typer.Option(help="also measure the held-out losses")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Losses, exactness, loops, tokens per step of an n-gram drafter, near-ties."""
    torch.set_num_threads(threads)
    folder = model or model_path()
    tokenizer, trained = load_tokenizer(folder), load_model(folder)
    engine = make_backend(backend, folder, dtype)
    result: dict[str, object] = {"backend": backend, "dtype": dtype}

    hand = ask(engine, tokenizer, [(p.name, p.render()) for p in HAND_PROMPTS], max_tokens)
    for answer in hand if show else ():
        print(f"\n## {answer.name}: {answer.tokens_per_step:.2f} tokens per step")
        print(tokenizer.decode(answer.output) + (END if answer.ended else " ..."))
    result["hand"] = summary(hand)
    result["hand_near_ties"] = near_ties(trained, hand)
    if isinstance(engine, TransformersBackend):
        result["hand_beams"] = beam_variety(engine, hand[::3])
    if per_kind:
        documents = held_out_documents(per_kind)
        held = ask(engine, tokenizer, [(d.kind, d.prompt) for d in documents], 400)
        result["held_out"] = summary(held)
        result["held_out_exact"] = exact_by_kind(held, documents, tokenizer)
    if losses:
        corpus, rng = load_corpus(), random.Random(2)
        maker = DocumentMaker(corpus.held_out, usable_names(corpus.train))
        any_kind = [maker.make(rng, max_chars=750) for _ in range(140)]
        values = held_out_losses(
            trained,
            encode_files(tokenizer, corpus.held_out),
            encode_documents(tokenizer, any_kind, 512),
        )
        result["loss"] = {name: round(value, 3) for name, value in values.items()}
    print(json.dumps(result, indent=1))
    if json_path is not None:
        # The outputs go to the file only: two backends' files can be compared.
        result["hand_outputs"] = {answer.name: answer.output for answer in hand}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
