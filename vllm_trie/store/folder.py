"""A folder of store files that engines share: each writes its own, and all read all of them."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import tempfile
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
"""Files that are read at a time, and engines of one model that write to one folder."""
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
KEY_BYTES = 32
_KEY_FILE = "prompts.key"
_RECENT_TEXTS = 16_384
"""Texts of a file, those used last, among which a later reading looks for new ones."""


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


class SharedFolder:
    """The files of one identity, each read again when it has changed.

    Args:
        folder: May be missing.
        identity: Of the engine; files of others are passed over.
        warn: Is told of each file that cannot be used, once.
    """

    def __init__(self, folder: Path, identity: Identity, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._identity = identity
        self._warn = functools.cache(warn)
        self._seen: dict[Path, tuple[float, frozenset[int]]] = {}
        """When each file was saved, and the keys of its recent texts."""

    def read(self, own: Path | None = None) -> list[Store]:
        """Return the files that have changed since the last call, the newest first.

        The first call returns whole files. Later ones leave out texts that were in a file before.

        Args:
            own: The engine's own file, whose texts are noted and not returned.
        """
        earlier = [keys for _, keys in self._seen.values()]
        newest_files = self._newest_files()
        # What is not read now is read later, without the texts that were in it before.
        seen = {path: self._seen[path] for _, path in newest_files if path in self._seen}
        changed: list[Store] = []
        num_tokens = 0
        for saved_at, path in newest_files:
            if path in seen and seen[path][0] == saved_at:
                continue
            if num_tokens > MAX_TOKENS:  # more would not be taken up
                break
            try:
                store = read_store(path)
            except StoreError as error:
                self._warn(str(error))
                continue
            num_tokens += store.header.num_tokens
            seen[path] = saved_at, frozenset(map(_key, store.texts[-_RECENT_TEXTS:]))
            if path == own:
                earlier.append(seen[path][1])
            else:
                changed.append(store)
        self._seen = seen
        if not earlier:
            return changed
        all_known = frozenset[int]().union(*earlier)
        return [_without(store, all_known) for store in changed]

    def _newest_files(self) -> list[tuple[float, Path]]:
        """Return when each file was saved, and its path."""
        saved: list[tuple[float, Path]] = []
        try:
            names = [path for path in self._folder.iterdir() if path.suffix == SUFFIX]
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn(f"store_path {self._folder}: {error.strerror}")
            return []
        for path in names:
            try:
                header = read_header(path)
                if Identity.of(header) == self._identity:
                    saved.append((header.saved_at, path))
            except StoreError as error:
                self._warn(str(error))
        return sorted(saved, reverse=True)[:MAX_FILES]


def _without(store: Store, keys: frozenset[int]) -> Store:
    """Return a store with its recent texts but those with one of these keys."""
    recent = store.texts[-_RECENT_TEXTS:]
    return store._replace(texts=[text for text in recent if _key(text) not in keys])


def _key(text: StoredText) -> int:
    """Return what stands for a text among those seen. Two may share it: the later is left out."""
    return hash((text.salt, text.token_ids.tobytes()))


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


def prompt_key(folder: Path) -> bytes:
    """Return the key of the fingerprints of prompts in a folder's files; make it if there is none.

    Engines that share the folder share it, and so do those after a restart.

    Raises:
        OSError: The file cannot be read or written.
    """
    path = folder / _KEY_FILE
    folder.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{_KEY_FILE}-")  # mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
        with suppress(FileExistsError):  # another engine was faster
            os.link(temporary, path)
        os.unlink(temporary)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} has {len(key)} bytes instead of {KEY_BYTES}; delete it")
    return key


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
        fault: OSError | str = "other engines hold them"
        for number in range(MAX_FILES):
            path = folder / f"{identity.key}-{number}{SUFFIX}"
            try:
                lock = os.fdopen(os.open(path.with_suffix(".lock"), _LOCK_FLAGS, 0o600), "w")
            except OSError as error:  # a link or a folder of this name, or another user's file
                fault = error
                continue
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
        raise OSError(f"none of {MAX_FILES} lock files can be taken: {fault}")

    def release(self) -> None:
        """Let another engine have the file."""
        self._lock.close()
