"""Data files with a checksum: prefix, header and body, written at once or not at all.

Layout, all integers little-endian:

    magic            8 bytes
    version          uint32
    header size      uint32
    digest          32 bytes   SHA-256 of everything that follows
    header                     JSON
    padding                    zeros up to a multiple of 64
    body                       arrays, as the header says
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from vllm_trie.files.sealed_copy import is_sealed, map_copy, sealed_copy

PREFIX = struct.Struct("<8sII32s")
_ALIGNMENT = 64
_MAX_HEADER = 1 << 20


class SizedHeader(BaseModel):
    """A header that knows the size of the body."""

    @property
    def body_size(self) -> int:
        """Bytes after the padding."""
        raise NotImplementedError


HeaderT = TypeVar("HeaderT", bound=SizedHeader)


class CheckedContent(NamedTuple, Generic[HeaderT]):
    """The content that a file had when it was opened, in memory.

    Attributes:
        header: The header.
        digest: The digest, which the content matches.
        body: uint8 [body_size].
        copy: Where other processes of the host can open the same memory while this one uses it.
    """

    header: HeaderT
    digest: bytes
    body: np.ndarray
    copy: str


@dataclass(frozen=True)
class CheckedFormat(Generic[HeaderT]):
    """One kind of file.

    Attributes:
        kind: What such a file is, for messages.
        magic: Its first 8 bytes.
        version: The only version that is written and read.
        header: Type of the header.
        error: Type of all errors.
        remedy: What to do about a file that cannot be used.
        private: Whether files are for their owner alone (mode 0600), whatever the umask.
    """

    kind: str
    magic: bytes
    version: int
    header: type[HeaderT]
    error: type[ValueError]
    remedy: str
    private: bool = False

    def problem(self, path: Path, reason: str) -> ValueError:
        """Return the error that says why a file cannot be used."""
        return self.error(f"{self.kind} {path}: {reason}; {self.remedy}")

    def write(self, path: Path, header: HeaderT, body: Iterable[Any]) -> None:
        """Write a file; an older one is replaced once the new one is complete.

        Args:
            body: Parts of the body in order, each a contiguous buffer.
        """
        text = header.model_dump_json().encode()
        padding = b"\0" * (-(PREFIX.size + len(text)) % _ALIGNMENT)
        digest = hashlib.sha256()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.seek(PREFIX.size)
                for part in chain((text, padding), body):
                    digest.update(part)
                    file.write(part)
                file.seek(0)
                file.write(PREFIX.pack(self.magic, self.version, len(text), digest.digest()))
            if not self.private:  # the mode of a temporary file is 0600
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def read_header(self, path: Path) -> HeaderT:
        """Return the header of a file; the body is not checked against the digest.

        Raises:
            ValueError: Of type `error`: the file is missing, of another kind or version, or
                truncated.
        """
        with self._file(path) as file:
            return self._read(path, file)[0]

    def read(self, path: Path, check: bool = True) -> CheckedContent[HeaderT]:
        """Copy a file to memory and compare it with its digest.

        The file may be written to, or shortened, meanwhile and later.

        Args:
            path: The file, or the `copy` of another process.
            check: Whether to compare the copy of another process, too, which has done so.

        Raises:
            ValueError: Of type `error`: as for :meth:`read_header`, or the content does not match
                the digest, or there is no memory for it.
        """
        with self._file(path) as file:
            self._read(path, file)
            shared = is_sealed(file)
            try:
                copy = sealed_copy(file)
            except OSError as error:
                raise self.problem(path, f"it cannot be copied to memory: {error}") from error
        with copy:
            copy.seek(0)
            header, digest, offset = self._read(path, copy)
            content, memory = map_copy(copy)
        if check or not shared:
            actual = hashlib.sha256(content[PREFIX.size :].data).digest()
            if actual != digest:
                reason = "its content does not match its digest: it is damaged or was changed"
                raise self.problem(path, reason)
        return CheckedContent(header, digest, content[offset:], memory)

    def _file(self, path: Path) -> BinaryIO:
        try:
            if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
                raise self.problem(path, "it is not a regular file")
            return path.open("rb")
        except OSError as error:
            raise self.problem(path, error.strerror or "it cannot be opened") from error

    def _read(self, path: Path, file: BinaryIO) -> tuple[HeaderT, bytes, int]:
        """Return the header, the digest and the offset of the body."""
        prefix = file.read(PREFIX.size)
        if prefix[: len(self.magic)] != self.magic[: len(prefix)] or not prefix:
            raise self.problem(path, f"it is not a {self.kind} file")
        if len(prefix) < PREFIX.size:
            raise self.problem(path, "it is truncated")
        _, version, size, digest = PREFIX.unpack(prefix)
        if version != self.version:
            raise self.problem(
                path, f"it has format version {version}, this program reads {self.version}"
            )
        if size > _MAX_HEADER:
            raise self.problem(path, "its header cannot be read: it is damaged")
        actual = os.fstat(file.fileno()).st_size
        text = file.read(min(size, actual))
        if len(text) < size:
            raise self.problem(path, "it is truncated")
        try:
            header = self.header.model_validate_json(text)
        except ValidationError:
            raise self.problem(path, "its header cannot be read: it is damaged") from None
        offset = PREFIX.size + size
        offset += -offset % _ALIGNMENT
        expected = offset + header.body_size
        if actual != expected:
            state = "truncated" if actual < expected else "longer than it should be"
            raise self.problem(path, f"it is {state}: {actual} bytes instead of {expected}")
        return header, digest, offset
