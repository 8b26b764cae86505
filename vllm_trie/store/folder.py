"""A folder of store files that engines share: each writes its own, all read all at their start."""

from __future__ import annotations

import fcntl
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from vllm_trie.store.store_file import (
    MAX_TOKENS,
    Store,
    StoredText,
    StoreError,
    StoreHeader,
    newest,
    read_header,
    read_store,
)

SUFFIX = ".store"
MAX_FILES = 64
"""Files that a start reads, and engines of one model that write to one folder."""


class Identity(NamedTuple):
    """What texts must share to be of use to one another."""

    model: str
    tokenizer: str
    """Fingerprint, empty if the engine has no tokenizer."""
    vocab_size: int

    @classmethod
    def of(cls, header: StoreHeader) -> Identity:
        """Return the identity of a file."""
        return cls(header.model, header.tokenizer, header.vocab_size)

    @property
    def key(self) -> str:
        """A short form, for names of files."""
        return hashlib.sha256("\0".join(map(str, self)).encode()).hexdigest()[:16]


def read_folder(folder: Path, identity: Identity, warn: Callable[[str], None]) -> list[Store]:
    """Return the files of an identity, the newest first; those of others are passed over.

    Args:
        folder: May be missing.
        identity: Of the engine.
        warn: Is told of each file that cannot be used.
    """
    found: list[tuple[float, Path]] = []
    try:
        names = [path for path in folder.iterdir() if path.suffix == SUFFIX]
    except FileNotFoundError:
        return []
    except OSError as error:
        warn(f"store_path {folder}: {error.strerror}")
        return []
    for path in names:
        try:
            header = read_header(path)
            if Identity.of(header) == identity:
                found.append((header.saved_at, path))
        except StoreError as error:
            warn(str(error))
    stores: list[Store] = []
    num_tokens = 0
    for _, path in sorted(found, reverse=True)[:MAX_FILES]:
        if num_tokens > MAX_TOKENS:  # more would not be taken up
            break
        try:
            stores.append(read_store(path))
            num_tokens += stores[-1].header.num_tokens
        except StoreError as error:
            warn(str(error))
    return stores


def merge_texts(stores: Sequence[Sequence[StoredText]], max_tokens: int) -> list[StoredText]:
    """Return the texts of several stores, those used last, in that order.

    The stores' last texts come last, then those before them. Engines read one another's texts: one
    that is in several stores is taken as often as it is in the one that has it most often.
    """
    merged: dict[tuple[bytes, bytes, int], StoredText] = {}
    seen: list[Counter[tuple[bytes, bytes]]] = [Counter() for _ in stores]
    for age in range(1, max(map(len, stores), default=0) + 1):
        for texts, count in zip(stores, seen, strict=True):
            if age <= len(texts):
                text = texts[-age]
                key = (text.salt, text.token_ids.tobytes())
                count[key] += 1
                merged.setdefault((*key, count[key]), text)
    return list(newest(list(merged.values())[::-1], max_tokens))


class Slot:
    """The file that one engine writes, locked as long as the engine lives.

    A restarted engine takes the file of its predecessor. Where a file system has no locks, engines
    that start together may share a file, and the last one to write it wins.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, folder: Path, identity: Identity) -> Slot:
        """Take the first file that no other engine holds; makes the folder if it is missing.

        Raises:
            OSError: The folder cannot be written to, or has too many engines.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(MAX_FILES):
            path = folder / f"{identity.key}-{number}{SUFFIX}"
            lock = path.with_suffix(".lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            except OSError:
                return cls(path, lock)
            for temporary in folder.glob(f".{path.name}-*"):  # of an engine that was killed
                with suppress(OSError):
                    temporary.unlink()
            return cls(path, lock)
        raise OSError(f"{MAX_FILES} engines write to this folder already")

    def release(self) -> None:
        """Let another engine have the file."""
        self._lock.close()
