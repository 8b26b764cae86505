"""Corpora to draft from: one memory-mapped file with the n-gram index of a text collection.

Layout, all integers little-endian:

    magic            8 bytes   b"VTRIECRP"
    version          uint32
    header size      uint32
    digest          32 bytes   SHA-256 of everything that follows
    header                     JSON: counts, order, vocabulary, tokenizer (class `CorpusHeader`)
    padding                    zeros up to a multiple of 64
    nodes           32 bytes each
    table            int32 each, its size a power of two
    tokens           int32 each, -1 between documents

The digest shows damage and tampering. The index is checked in addition: a file made to deceive is
refused and never crashes the engine.

The idea of drafting from a data store: He et al., "REST: Retrieval-Based Speculative Decoding".
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_trie.ngrams import native
from vllm_trie.ngrams.index import MAX_ORDER

MAGIC = b"VTRIECRP"
VERSION = 1
_PREFIX = struct.Struct("<8sII32s")
_ALIGNMENT = 64


class CorpusError(ValueError):
    """A corpus file cannot be used. The message names the file, the reason and the remedy."""


class CorpusHeader(BaseModel):
    """Contents of a corpus file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_documents: int = Field(ge=0)
    num_tokens: int = Field(ge=0, description="Without separators.")
    token_array_size: int = Field(ge=0)
    num_nodes: int = Field(ge=1)
    table_size: int = Field(ge=1)
    max_order: int = Field(ge=1, le=15)
    vocab_size: int = Field(ge=1)
    tokenizer: str = Field(description="Fingerprint of the tokenizer, see `fingerprint`.")


def fingerprint(vocabulary: dict[str, int]) -> str:
    """Identify a tokenizer by its vocabulary, token text to id."""
    digest = hashlib.sha256()
    for text, token in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token}:{len(text)}:{text}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def write_corpus(
    path: Path,
    documents: Iterable[np.ndarray],
    vocab_size: int,
    tokenizer: str,
    max_order: int = MAX_ORDER,
) -> CorpusHeader:
    """Index documents and write the file; an older one is replaced once the new one is complete.

    Args:
        documents: int32 token ids of each document.
        vocab_size: token ids are in [0, vocab_size).
        tokenizer: fingerprint of the tokenizer that the ids come from.
        max_order: longest context that is indexed.

    Raises:
        CorpusError: a token is outside the vocabulary, or there is no text.
    """
    tokens, num_documents = _join(documents, vocab_size)
    index = native.NativeIndex(max_order)
    index.add_text(tokens)
    nodes, table = index.arrays()
    header = CorpusHeader(
        num_documents=num_documents,
        num_tokens=len(tokens) - num_documents,
        token_array_size=len(tokens),
        num_nodes=len(nodes) // native.NODE_BYTES,
        table_size=len(table) // 4,
        max_order=max_order,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
    )
    text = header.model_dump_json().encode()
    padding = b"\0" * (-(_PREFIX.size + len(text)) % _ALIGNMENT)
    body = [text, padding, nodes, table, tokens.astype("<i4").tobytes()]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    _replace(path, [_PREFIX.pack(MAGIC, VERSION, len(text), digest.digest()), *body])
    return header


def _join(documents: Iterable[np.ndarray], vocab_size: int) -> tuple[np.ndarray, int]:
    """Return the tokens of all documents, each followed by -1, and the number of documents."""
    parts: list[np.ndarray] = []
    for number, document in enumerate(documents):
        tokens = np.ascontiguousarray(document, dtype=np.int32)
        if len(tokens) == 0:
            continue
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise CorpusError(
                f"document {number} has token {wrong}; token ids are in [0, {vocab_size})"
            )
        parts += [tokens, np.array([-1], dtype=np.int32)]
    if not parts:
        raise CorpusError("the corpus has no text")
    return np.concatenate(parts), len(parts) // 2


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file under another name, and rename it once it is complete."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_header(path: Path) -> CorpusHeader:
    """Return the header of a corpus file; its content is not checked against the digest.

    Raises:
        CorpusError: not a corpus file, of another version, or truncated.
    """
    with _open(path) as file:
        return _read_header(path, file)[0]


def open_corpus(
    path: Path, vocab_size: int | None = None, tokenizer: str | None = None
) -> native.NativeCorpus:
    """Check a whole corpus file and map it into memory.

    Args:
        vocab_size: of the target model; the corpus may not have tokens beyond it.
        tokenizer: fingerprint of the target model's tokenizer.

    Raises:
        CorpusError: the file is missing, not a corpus, of another version, truncated, changed
            since it was written, made with another tokenizer, or not a sound index.
    """
    with _open(path) as file:
        header, digest, offset = _read_header(path, file)
        file.seek(_PREFIX.size)
        found = hashlib.file_digest(file, "sha256").digest()
    if found != digest:
        raise _error(path, "its content does not match its digest: it is damaged or was changed")
    if tokenizer is not None and tokenizer != header.tokenizer:
        raise _error(path, "it was built with another tokenizer than the model's")
    if vocab_size is not None and header.vocab_size > vocab_size:
        raise _error(
            path, f"its vocabulary has {header.vocab_size} tokens, the model's has {vocab_size}"
        )
    data = np.memmap(path, dtype=np.uint8, mode="r")
    sizes = [header.num_nodes * native.NODE_BYTES, header.table_size * 4]
    nodes, table, tokens = np.split(data[offset:], np.cumsum(sizes))
    try:
        return native.NativeCorpus(
            nodes, table.view("<i4"), tokens.view("<i4"), header.max_order, header.vocab_size
        )
    except ValueError as error:
        raise _error(path, str(error)) from None


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"corpus {path}: {error.strerror}") from None


def _read_header(path: Path, file: BufferedReader) -> tuple[CorpusHeader, bytes, int]:
    """Return the header, the digest and the offset of the nodes."""
    prefix = file.read(_PREFIX.size)
    if prefix[: len(MAGIC)] != MAGIC[: len(prefix)] or not prefix:
        raise _error(path, "it is not a corpus file")
    if len(prefix) < _PREFIX.size:
        raise _error(path, "it is truncated")
    _, version, size, digest = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise _error(path, f"it has format version {version}, this program reads {VERSION}")
    actual = os.fstat(file.fileno()).st_size
    text = file.read(min(size, actual))
    if len(text) < size:
        raise _error(path, "it is truncated")
    try:
        header = CorpusHeader.model_validate_json(text)
    except ValidationError:
        raise _error(path, "its header cannot be read: it is damaged") from None
    offset = _PREFIX.size + size
    offset += -offset % _ALIGNMENT
    expected = (
        offset
        + header.num_nodes * native.NODE_BYTES
        + 4 * (header.table_size + header.token_array_size)
    )
    if actual != expected:
        state = "truncated" if actual < expected else "longer than it should be"
        raise _error(path, f"it is {state}: {actual} bytes instead of {expected}")
    return header, digest, offset


def _error(path: Path, reason: str) -> CorpusError:
    return CorpusError(
        f"corpus {path}: {reason}; build it again with `vllm-trie corpus build` and the model's "
        "tokenizer"
    )
