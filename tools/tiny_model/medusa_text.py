"""Write the text that the shipped heads are trained on: what the model read, and what it writes.

`python -m tools.tiny_model.medusa_text --out FILE`
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from tools.tiny_model.backends import make_backend
from tools.tiny_model.data.corpus import load_corpus
from tools.tiny_model.data.dataset import Dataset, build_dataset
from vllm_trie.lab.tiny_model import model_path

_PLAIN_PIECE = 512
"""Tokens of plain code on one line of the file."""
_CORPUS_SHARE = 0.3
"""Text of the corpus, in parts of the model's own, that is mixed with it."""
_ANSWER_TOKENS = 160
_LONGEST_PROMPT = 1200


def write_training_text(
    out: Path,
    model_folder: Path,
    seed: int = 0,
    documents: int = 40_000,
    continuations: int = 0,
) -> int:
    """Write training text as a `.jsonl` file of token ids, in random order.

    Without `continuations` the text is the shipped model's whole data set. With them it is the
    model's greedy continuations of that many prompts, which is the text that drafts are made for,
    and a part of the data set. The data set is made next to `out` if it is not there yet, which
    takes a few minutes. Held-out modules are left out.

    Returns:
        The number of tokens.

    Raises:
        ValueError: the data set has another tokenizer than the model, because this Python's
            standard library, `seed` or `documents` differ from those of its training.
    """
    data = _data_set(out.parent, model_folder, seed, documents)
    texts = list(_corpus_texts(data))
    random.Random(seed).shuffle(texts)
    if continuations:
        own = _own_texts(data, model_folder, seed, continuations)
        wanted = _CORPUS_SHARE * sum(map(len, own))
        totals = np.cumsum([len(text) for text in texts])
        texts = own + texts[: int(np.searchsorted(totals, wanted)) + 1]
        random.Random(seed + 1).shuffle(texts)
    with out.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"token_ids": list(map(int, text))}) + "\n")
    return sum(map(len, texts))


def _data_set(folder: Path, model_folder: Path, seed: int, documents: int) -> Dataset:
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / f"data-{seed}-{documents}.npz"
    if not saved.exists():
        build_dataset(load_corpus(), folder, seed, documents).save(saved)
    made, shipped = (
        json.loads((where / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        for where in (folder, model_folder)
    )
    if made != shipped:
        raise ValueError(
            f"the text made with seed={seed} and documents={documents} has another tokenizer than "
            f"the model in {model_folder}; leave both at their defaults, and use the Python "
            "version that the model was trained with: the text is its standard library's"
        )
    return Dataset.load(saved)


def _corpus_texts(data: Dataset) -> Iterator[Sequence[int]]:
    for pool in (data.documents, data.long_documents, data.longest_documents, data.snippets):
        for index in range(len(pool)):
            tokens, _ = pool[index]
            # The trainer closes each text itself.
            yield tokens[:-1] if len(tokens) and tokens[-1] == 0 else tokens
    # The data set holds the plain files several times over, in different orders.
    plain = data.plain[: len(data.plain) // 3]
    yield from (plain[i : i + _PLAIN_PIECE] for i in range(0, len(plain), _PLAIN_PIECE))


def _own_texts(data: Dataset, model_folder: Path, seed: int, count: int) -> list[list[int]]:
    """Prompts with the model's greedy answers: two thirds tasks, one third begun functions."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.67:
            pool = data.documents if kind < 0.57 else data.long_documents
            tokens, split = pool[rng.randrange(len(pool))]
        else:
            tokens, _ = data.snippets[rng.randrange(len(data.snippets))]
            split = rng.randint(min(8, len(tokens)), max(8, len(tokens) // 2))
        prompts.append(tokens[: min(split, _LONGEST_PROMPT)].tolist() or [0])
    answers = make_backend("vllm", model_folder, "float32").generate(prompts, _ANSWER_TOKENS)
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]


def main(
    out: Annotated[Path, typer.Option(help="the .jsonl file to write")],
    model: Annotated[Path | None, typer.Option(help="folder; the shipped model")] = None,
    documents: Annotated[int, typer.Option(help="task documents to make")] = 40_000,
    continuations: Annotated[
        int, typer.Option(help="prompts that the model continues; 0: the data set alone")
    ] = 0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write the text that the shipped heads are trained on."""
    tokens = write_training_text(out, model or model_path(), seed, documents, continuations)
    print(f"wrote {tokens} tokens to {out}")


if __name__ == "__main__":
    typer.run(main)
