"""Ids while a catalogue is built: their values, their text, and the index by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from vllm_trie.items.runs import append, chunks, parts, sorted_runs
from vllm_trie.items.trie import ItemId, text_key
from vllm_trie.items.trie_file import ItemsError

_SIGN = np.uint64(1 << 63)
"""Turns the order of int64 into that of uint64."""


class IdFile:
    """Ids on their way to the trie: integers as values, strings in a file, in the input's order."""

    def __init__(self, folder: Path) -> None:
        self.kind: type | None = None
        self.num_texts = 0
        self.num_bytes = 0
        self._lengths = folder / "id-lengths"
        self._texts = folder / "id-texts"
        self._text_keys = folder / "id-text-keys"
        self._index = folder / "id-index"

    def add(self, ids: list[ItemId] | np.ndarray) -> np.ndarray:
        """Return int64[n], the values of ids: themselves, or their places in the file.

        Raises:
            ItemsError: Some ids are integers and others strings.
        """
        kind = int if isinstance(ids, np.ndarray) else type(ids[0])
        self.kind = self.kind or kind
        if kind is not self.kind:
            raise ItemsError("some ids are strings and others integers; use one type for all")
        if kind is int:
            return np.asarray(ids, dtype=np.int64)
        texts = [str(each).encode() for each in ids]
        append(self._lengths, np.array([len(text) for text in texts], dtype="<i8"))
        append(self._texts, np.frombuffer(b"".join(texts), dtype="u1"))
        append(self._text_keys, np.array([text_key(text) for text in texts], dtype="<i8"))
        values = np.arange(self.num_texts, self.num_texts + len(texts))
        self.num_texts += len(texts)
        self.num_bytes += sum(map(len, texts))
        return values

    def text(self, value: int) -> str:
        """Return the id of a value."""
        if self.kind is int:
            return str(value)
        lengths = np.memmap(self._lengths, dtype="<i8", mode="r")
        begin = int(lengths[:value].sum())
        with self._texts.open("rb") as file:
            file.seek(begin)
            return repr(file.read(int(lengths[value])).decode())

    def offsets(self) -> Iterator[np.ndarray]:
        """Yield int64[num_texts + 1] in parts."""
        total = 0
        yield np.zeros(1, dtype="<i8")
        for lengths in chunks(self._lengths, "<i8"):
            ends = total + np.cumsum(lengths)
            total = int(ends[-1])
            yield ends

    def texts(self) -> Iterator[np.ndarray]:
        return chunks(self._texts, "u1")

    # -- the index ---------------------------------------------------------------------------------

    def sort(self, values: Iterable[np.ndarray]) -> None:
        """Make the index of the items whose values int64[...] come in the order of the items."""
        self._index.mkdir()
        keyed = self._with_keys(values)
        for part in parts(list(sorted_runs(keyed, self._index)), 2):
            keys = (part.rows.view(">u8").ravel() ^ _SIGN).astype("<u8").view("<i8")
            append(self._index / "keys", keys)
            append(self._index / "numbers", part.values.astype("<i4"))

    def sorted_keys(self) -> Iterator[np.ndarray]:
        """Yield int64[items], keys of the items in ascending order, in parts."""
        return chunks(self._index / "keys", "<i8")

    def sorted_numbers(self) -> Iterator[np.ndarray]:
        """Yield int32[items], the items in the order of their keys, in parts."""
        return chunks(self._index / "numbers", "<i4")

    def _with_keys(self, values: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the keys of items as rows that sort as bytes, and the numbers of the items."""
        of_text = None if self.kind is int else np.memmap(self._text_keys, dtype="<i8", mode="r")
        first = 0
        for part in values:
            keys = part if of_text is None else np.asarray(of_text[part])
            rows = (keys.astype("<i8").view("<u8") ^ _SIGN).astype(">u8").view(">u4")
            yield rows.reshape(-1, 2), np.arange(first, first + len(part))
            first += len(part)
