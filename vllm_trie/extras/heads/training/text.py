"""Training text as rows of tokens.

A token that heads only read, because the model did not write it, is stored as its complement,
~token: the user's turns of a chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

Encode = Callable[[str], Sequence[int]]


class Encoder(NamedTuple):
    """Turns the texts of a file into tokens."""

    text: Encode
    chat: Encode
    """Returns a chat of one user's turn, up to where the answer begins."""
    eos_token_id: int | None
    vocab_size: int


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files named, and all those below the folders named, in sorted order.

    Raises:
        FileNotFoundError: A path does not exist, or nothing was found.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"data {path} does not exist; give text files or folders")
    if not files:
        raise FileNotFoundError("the data holds no files; give text files or folders of them")
    return files


def read_tokens(files: Sequence[Path], encoder: Encoder) -> np.ndarray:
    """Return all texts end to end, int32, each closed by EOS.

    A file is one text. In a `.jsonl` file each line is one: an object with `text`, or with
    `token_ids` for text that is tokenized already. With a `question` next to them they are the
    model's answer to it, as `vllm-trie corpus synthesize` writes them; the question's tokens are
    stored as their complements.

    Raises:
        ValueError: A line of a `.jsonl` file is something else, or the model has no chat template.
    """
    end = [] if encoder.eos_token_id is None else [encoder.eos_token_id]
    parts = []
    for file in tqdm(files, desc="reading text", unit="file", leave=False, disable=None):
        for question, tokens in _texts(file, encoder):
            if list(tokens[-1:]) != end:  # an answer's last token may be EOS already
                tokens = [*tokens, *end]
            parts += [~np.array(question, dtype=np.int32), np.array(tokens, dtype=np.int32)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _texts(file: Path, encoder: Encoder) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the question's tokens, mostly none, and those of the text."""
    encode = encoder.text
    if file.suffix != ".jsonl":
        yield (), encode(file.read_text(encoding="utf-8", errors="replace"))
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line.decode())
                if number == 1 and set(item) == {"settings"}:  # of `vllm-trie corpus synthesize`
                    continue
                tokens = item["token_ids"] if "token_ids" in item else encode(item["text"])
                question = item.get("question")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file}, line {number}: expected an object with 'text' or 'token_ids'"
                ) from error
            if "token_ids" in item and not _are_tokens(tokens, encoder.vocab_size):
                raise ValueError(
                    f"{file}, line {number}: 'token_ids' must be a list of integers in "
                    f"[0, {encoder.vocab_size}), the model's vocabulary; tokenize the text with "
                    "the model's tokenizer, or give 'text'"
                )
            yield () if question is None else encoder.chat(question), tokens


def _are_tokens(value: object, vocab_size: int) -> bool:
    return isinstance(value, list) and all(
        type(token) is int and 0 <= token < vocab_size for token in value
    )


class TokenRows:
    """Rows of equal length, cut from one stream and visited in a new order each epoch.

    The order depends on the seed alone, so that a run can be resumed at any row.

    Attributes:
        rows: int32 [num_rows, length], in the order of the text.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int = 0) -> None:
        """`tokens`: int32 [n]. Raises ValueError if they do not fill one row."""
        self._length = length
        self._seed = seed
        self.num_rows = len(tokens) // length
        if self.num_rows == 0:
            raise ValueError(
                f"the text has {len(tokens)} tokens, a row takes {length}; give more text or a "
                "smaller --context"
            )
        self.rows = tokens[: self.num_rows * length].reshape(self.num_rows, length)
        self._last_epoch, self._last_order = -1, np.arange(0)

    def batch(self, first: int, count: int) -> np.ndarray:
        """Return rows number `first` to `first + count` of the endless sequence, int64
        [count, length]."""
        chosen: np.ndarray = self.rows[self.numbers(first, count)].astype(np.int64)
        return chosen

    def numbers(self, first: int, count: int) -> np.ndarray:
        """Return which rows of the text these are, int64 [count]."""
        chosen = []
        for number in range(first, first + count):
            epoch, position = divmod(number, self.num_rows)
            chosen.append(self._order(epoch)[position])
        return np.array(chosen, dtype=np.int64)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch != self._last_epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._last_epoch, self._last_order = epoch, generator.permutation(self.num_rows)
        return self._last_order


def split_rows(tokens: np.ndarray, length: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Take rows out for validation: (training tokens, validation tokens).

    The rows lie together at the end of the text, so they share no file with training, except for
    the one that is cut.
    """
    num_held = max(1, round(len(tokens) // length * share))
    cut = len(tokens) - num_held * length
    if cut < length:
        raise ValueError(
            f"the text has {len(tokens)} tokens, too few to train and validate on rows of "
            f"{length}; give more text, --validation files, or a smaller --context"
        )
    return tokens[:cut], tokens[cut:]
