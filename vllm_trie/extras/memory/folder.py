"""A folder of store files: each engine writes its own, and starts from the newest."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from vllm_trie.drafts.text_store import KEY_BYTES, StoredText
from vllm_trie.extras.memory.store_file import (
    StoreError,
    read_header,
    read_store,
)

SUFFIX = ".store"
MAX_FILES = 64
"""Engines of one model that write to one folder."""
_MAX_SAVE_S = 24 * 3600.0
"""Age from which a temporary file is that of a killed engine, whichever engine's it was."""
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_KEY_FILE = "prompts.key"


class Identity(NamedTuple):
    """The properties that texts must share to be of use to one another."""

    model: str
    tokenizer: str
    """Fingerprint, empty if the engine has no tokenizer."""
    vocab_size: int

    @property
    def key(self) -> str:
        """A short form, for names of files."""
        return hashlib.sha256("\0".join(map(str, self)).encode()).hexdigest()[:16]


def read_newest(
    folder: Path, identity: Identity, warn: Callable[[str], None]
) -> list[StoredText] | None:
    """Return the texts of the newest file of an identity that can be used, None without one.

    Args:
        folder: May be missing.
        identity: Of the engine; files of others are passed over.
        warn: Called for each file that cannot be used.
    """
    for path in _newest_files(folder, identity, warn):
        try:
            return read_store(path)
        except StoreError as error:
            warn(str(error))
    return None


def _newest_files(folder: Path, identity: Identity, warn: Callable[[str], None]) -> list[Path]:
    saved: list[tuple[float, Path]] = []
    try:
        paths = [path for path in folder.iterdir() if path.suffix == SUFFIX]
    except FileNotFoundError:
        return []
    except OSError as error:
        warn(f"store_path {folder}: {error.strerror}")
        return []
    for path in paths:
        try:
            header = read_header(path)
        except StoreError as error:
            warn(str(error))
            continue
        if Identity(header.model, header.tokenizer, header.vocab_size) == identity:
            saved.append((header.saved_at, path))
    return [path for _, path in sorted(saved, reverse=True)]


def prompt_key(folder: Path) -> bytes:
    """Return the key of the fingerprints of prompts in a folder's files; make it if there is none.

    Engines that share the folder share it, and so do those after a restart.

    Raises:
        OSError: The file cannot be read or written.
    """
    path = folder / _KEY_FILE
    folder.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        new_key = os.urandom(KEY_BYTES)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{_KEY_FILE}-")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(new_key)
            os.link(temporary, path)
        except FileExistsError:  # another engine was faster
            pass
        except OSError:  # a file system without hard links
            with suppress(FileExistsError), open(path, "xb", opener=_open_private) as file:
                file.write(new_key)
        finally:
            os.unlink(temporary)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} has {len(key)} bytes instead of {KEY_BYTES}; delete it")
    return key


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class StoreFile:
    """The file that one engine writes, locked as long as the engine lives.

    A restarted engine takes the file of its predecessor. Where a file system has no locks, engines
    that start together may share a file, and the last one to write it wins.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, folder: Path, identity: Identity) -> StoreFile:
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
            for temporary in folder.glob(f".*{SUFFIX}-*"):  # of engines that were killed
                with suppress(OSError):
                    age = time.time() - temporary.stat().st_mtime
                    if temporary.name.startswith(f".{path.name}-") or age > _MAX_SAVE_S:
                        temporary.unlink()
            return cls(path, lock)
        raise OSError(f"none of {MAX_FILES} lock files can be taken: {fault}")

    def release(self) -> None:
        """Let another engine have the file."""
        self._lock.close()
