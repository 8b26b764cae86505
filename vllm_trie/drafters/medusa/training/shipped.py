"""The text that the shipped model's own heads are trained on: what the model itself read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vllm_trie.tiny_model.dataset import Dataset, build_dataset

_PLAIN_PIECE = 512
"""Tokens of plain code on one line of the file."""


def write_training_text(
    out: Path, model_folder: Path, seed: int = 0, documents: int = 40_000
) -> int:
    """Write the shipped model's data set as a `.jsonl` file of token ids, in random order.

    The data set is made beside `out` if it is not there yet, which takes a few minutes. Modules
    that the model never saw are left out here too.

    Returns:
        The number of tokens.

    Raises:
        ValueError: this Python's standard library gives another tokenizer than the model's, so that
            the tokens would mean something else.
    """
    from vllm_trie.tiny_model.corpus import load_corpus

    folder = out.parent
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
            "the text that this Python's standard library gives has another tokenizer than the "
            f"model in {model_folder}; use the Python version that the model was trained with"
        )
    texts = list(_texts(Dataset.load(saved)))
    order = np.random.default_rng(seed).permutation(len(texts))
    with out.open("w", encoding="utf-8") as file:
        for number in order:
            file.write(json.dumps({"token_ids": texts[number].tolist()}) + "\n")
    return sum(map(len, texts))


def _texts(data: Dataset) -> Iterator[np.ndarray]:
    for pool in (data.documents, data.long_documents, data.longest_documents, data.snippets):
        for index in range(len(pool)):
            tokens, _ = pool[index]
            # The trainer closes each text itself.
            yield tokens[:-1] if len(tokens) and tokens[-1] == 0 else tokens
    # The data set holds the plain files several times over, in different orders.
    plain = data.plain[: len(data.plain) // 3]
    yield from (plain[i : i + _PLAIN_PIECE] for i in range(0, len(plain), _PLAIN_PIECE))
