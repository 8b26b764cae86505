"""Items from files: JSON lines and NumPy arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_trie.extras.items.trie import ItemId
from vllm_trie.extras.items.trie_file import ItemsError

Encode = Callable[[str], list[int]]
"""Token ids of a text."""
ErrorAt = Callable[[int, str], ItemsError]
"""Takes the index of an item of a batch and what is wrong with it; its message names its origin."""

MAX_LENGTH = 512
"""Longest item, tokens: far beyond item names, and short enough for rows of one width."""
MAX_TOKEN = 2**31 - 2
_MAX_WEIGHT = 1e6
"""Largest absolute weight: scores stay far from float32's limits."""

_BATCH = 1 << 14
_LIMITS = np.iinfo(np.int64)


class Batch(NamedTuple):
    """Some items.

    Attributes:
        rows: >u4[n, width], token + 1, zeros behind the last token.
        ids: Their ids, all of one type.
        weights: float32 [n], None if all are 0.
    """

    rows: np.ndarray
    ids: list[ItemId] | np.ndarray
    weights: np.ndarray | None = None


def read_items(
    path: Path, encode: Encode | None = None, vocab_size: int | None = None
) -> Iterator[Batch]:
    """Yield the items of a file: ``*.jsonl`` or ``*.npy``.

    Args:
        encode: Turns the field ``text`` into tokens; None refuses texts.
        vocab_size: Tokens must be below it; None: any token.

    Raises:
        ItemsError: The file is of another kind, or something in it is wrong; the message names the
            place.
    """
    readers = {".jsonl": _read_lines, ".npy": _read_array}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ItemsError(f"{path} is not *.jsonl or *.npy; convert it to one of them")
    return reader(path, encode, MAX_TOKEN if vocab_size is None else vocab_size - 1)


def _read_lines(path: Path, encode: Encode | None, max_token: int) -> Iterator[Batch]:
    with path.open("rb") as file:
        first = 1
        while lines := list(islice(file, _BATCH)):
            numbers = [n for n, line in enumerate(lines, first) if not line.isspace()]
            if numbers:
                filled = [lines[n - first] for n in numbers]
                error_at = partial(_error, f"{path}, line", numbers)
                yield _batch(_parse(filled, error_at), encode, max_token, error_at)
            first += len(lines)


def _error(unit: str, numbers: Sequence[int], index: int, reason: str) -> ItemsError:
    return ItemsError(f"{unit} {numbers[index]}: {reason}")


def _parse(lines: list[bytes], error_at: ErrorAt) -> list[Any]:
    try:  # one call instead of thousands
        items = json.loads(b"[" + b",".join(lines) + b"]")
        if len(items) == len(lines):
            return list(items)
    except ValueError:
        pass
    items = []
    for index, line in enumerate(lines):
        try:
            items.append(json.loads(line))
        except ValueError as error:
            raise error_at(index, f"this is not JSON: {error}") from None
    return items


def _batch(items: list[Any], encode: Encode | None, max_token: int, error_at: ErrorAt) -> Batch:
    """Return dictionaries with ``id``, ``tokens`` or ``text``, and ``weight`` as a batch."""
    for index, item in enumerate(items):
        if not isinstance(item, dict) or "id" not in item:
            raise error_at(index, "an item must be an object with 'id' and 'tokens' or 'text'")
        if "tokens" not in item:
            item["tokens"] = _encoded(item, encode, error_at, index)
    ids = [item["id"] for item in items]
    _check_ids(ids, error_at)
    rows = _rows([item["tokens"] for item in items], max_token, error_at)
    return Batch(rows, ids, _weights(items, error_at))


def _weights(items: list[Any], error_at: ErrorAt) -> np.ndarray | None:
    values = [item.get("weight") for item in items]
    if all(value is None for value in values):
        return None
    for index, value in enumerate(values):
        if value is not None and (type(value) not in (int, float) or not abs(value) <= _MAX_WEIGHT):
            raise error_at(
                index, f"weight {value!r} must be a number from {-_MAX_WEIGHT:g} to {_MAX_WEIGHT:g}"
            )
    return np.array([value or 0.0 for value in values], dtype=np.float32)


def _encoded(
    item: dict[str, object], encode: Encode | None, error_at: ErrorAt, index: int
) -> list[int]:
    text = item.get("text")
    if not isinstance(text, str):
        raise error_at(index, "the item has neither 'tokens' (integers) nor 'text' (a string)")
    if encode is None:
        raise error_at(index, "the item has a 'text'; name the model's tokenizer (--tokenizer)")
    return encode(text)


def _check_ids(ids: list[Any], error_at: ErrorAt) -> None:
    types = set(map(type, ids))
    if types == {str}:
        try:
            "".join(ids).encode()
        except UnicodeEncodeError as error:
            ends = accumulate(map(len, ids))
            index = next(i for i, end in enumerate(ends) if end > error.start)
            raise error_at(index, f"id {ids[index]!r} has half a surrogate pair") from None
        return
    if types == {int} and min(ids) >= _LIMITS.min and max(ids) <= _LIMITS.max:
        return
    for index, item_id in enumerate(ids):
        if type(item_id) is int and not _LIMITS.min <= item_id <= _LIMITS.max:
            raise error_at(index, f"id {item_id} does not fit into 64 bits; write it as a string")
        if type(item_id) not in (str, int):
            raise error_at(index, f"id {item_id!r} must be a string or an integer")
        if type(item_id) is not type(ids[0]):
            raise error_at(
                index, f"id {item_id!r} is of another type than {ids[0]!r}; use one type for all"
            )


def _rows(every: list[Any], max_token: int, error_at: ErrorAt) -> np.ndarray:
    """Return lists of tokens as rows."""
    for index, tokens in enumerate(every):
        if type(tokens) is not list or not 0 < len(tokens) <= MAX_LENGTH:
            if type(tokens) is not list:
                raise error_at(index, f"tokens must be a list of integers, got {tokens!r}")
            reason = "the item has no tokens" if not tokens else f"it has {len(tokens)} tokens"
            raise error_at(index, f"{reason}; an item has 1 to {MAX_LENGTH}")
    if set(map(type, chain.from_iterable(every))) != {int}:
        for index, tokens in enumerate(every):
            for token in tokens:
                if type(token) is not int:
                    raise error_at(index, f"token {token!r} must be an integer")
    try:
        flat = np.fromiter(chain.from_iterable(every), dtype=np.int64)
    except OverflowError:
        flat = np.array([2**62], dtype=np.int64)
    if flat.min() < 0 or flat.max() > max_token:
        for index, tokens in enumerate(every):
            for token in tokens:
                if not 0 <= token <= max_token:
                    raise error_at(index, f"token {token} is outside of [0, {max_token}]")
    lengths = np.array([len(tokens) for tokens in every])
    rows = np.zeros((len(every), lengths.max()), dtype=">u4")
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = flat + 1
    return rows


def _read_array(path: Path, encode: Encode | None, max_token: int) -> Iterator[Batch]:
    """Yield the rows of int [items, width], negative behind the last token; ids are row numbers."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ItemsError(f"{path} cannot be read as a NumPy array: {error}") from None
    if (
        not isinstance(array, np.ndarray)
        or array.ndim != 2
        or not np.issubdtype(array.dtype, np.integer)
        or not 1 <= array.shape[1] <= MAX_LENGTH
    ):
        shape = getattr(array, "shape", "several arrays")
        raise ItemsError(
            f"{path}: items must be an integer array of shape [items, 1 to {MAX_LENGTH}], this is "
            f"{getattr(array, 'dtype', 'an archive')} {shape}"
        )
    for first in range(0, len(array), _BATCH):
        tokens = np.asarray(array[first : first + _BATCH]).astype(np.int64)
        error_at = partial(_error, f"{path}, row", range(first, first + len(tokens)))
        used = tokens >= 0
        for wrong, reason in (
            (~used[:, 0], "the item has no tokens"),
            ((used[:, 1:] & ~used[:, :-1]).any(axis=1), "a token follows the padding"),
            ((tokens > max_token).any(axis=1), f"a token is outside of [0, {max_token}]"),
        ):
            if wrong.any():
                raise error_at(int(np.argmax(wrong)), reason)
        rows = np.where(used, tokens + 1, 0).astype(">u4")
        yield Batch(rows, np.arange(first, first + len(tokens)))
