"""Corpora to draft from: one file with the n-gram index of a text collection.

The body of the file (see :mod:`vllm_trie.files.checked_file`), all integers little-endian:

    nodes           32 bytes each
    table            int32 each, its size a power of two
    tokens           int32 each, -1 between documents

The digest shows damage and tampering. The index is checked in addition: a file made to deceive is
refused and never crashes the engine.

The idea of drafting from a data store: He et al., "REST: Retrieval-Based Speculative Decoding".
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import ConfigDict, Field

from vllm_trie.drafts.ngrams import native
from vllm_trie.drafts.ngrams.native import MAX_ORDER
from vllm_trie.files.checked_file import CheckedFormat, SizedHeader
from vllm_trie.refusal import RefusedError


class CorpusError(RefusedError):
    """A corpus file cannot be used. The message names the file, the reason and the remedy."""


class CorpusHeader(SizedHeader):
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

    @property
    def body_size(self) -> int:
        return self.num_nodes * native.NODE_BYTES + 4 * (self.table_size + self.token_array_size)


FORMAT = CheckedFormat(
    kind="corpus",
    magic=b"VTRIECRP",
    version=1,
    header=CorpusHeader,
    error=CorpusError,
    remedy="build it with `vllm-trie corpus build` and the model's tokenizer",
)
read_header = FORMAT.read_header


def write_corpus(
    path: Path, documents: Iterable[np.ndarray], vocab_size: int, tokenizer: str
) -> CorpusHeader:
    """Index documents and write the file; an older one is replaced once the new one is complete.

    Args:
        documents: int32 token ids of each document.
        vocab_size: Token ids are in [0, vocab_size).
        tokenizer: Fingerprint of the tokenizer that the ids come from.

    Raises:
        CorpusError: A token is outside the vocabulary, or there is no text.
    """
    tokens, num_documents = _join(documents, vocab_size)
    index = native.NativeIndex(MAX_ORDER)
    index.add_text(tokens)
    nodes, table = index.arrays()
    header = CorpusHeader(
        num_documents=num_documents,
        num_tokens=len(tokens) - num_documents,
        token_array_size=len(tokens),
        num_nodes=len(nodes) // native.NODE_BYTES,
        table_size=len(table) // 4,
        max_order=MAX_ORDER,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
    )
    FORMAT.write(path, header, [nodes, table, tokens.astype("<i4").tobytes()])
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


def check_vocabulary(path: Path, header: CorpusHeader, vocab_size: int) -> None:
    """Refuse a corpus with tokens that a model does not have.

    Raises:
        CorpusError: The corpus' vocabulary is larger than `vocab_size`.
    """
    if header.vocab_size > vocab_size:
        raise FORMAT.problem(
            path, f"its vocabulary has {header.vocab_size} tokens, the model's has {vocab_size}"
        )


def open_corpus(
    path: Path, vocab_size: int | None = None, tokenizer: str | None = None
) -> native.NativeArchive:
    """Check a whole corpus file and copy it to memory.

    Args:
        vocab_size: Of the target model; the corpus may not have tokens beyond it.
        tokenizer: Fingerprint of the target model's tokenizer.

    Raises:
        CorpusError: The file is missing, not a corpus, of another version, truncated, changed
            since it was written, made with another tokenizer, or not a sound index.
    """
    header, _, body, _ = FORMAT.read(path)
    if tokenizer is not None and tokenizer != header.tokenizer:
        raise FORMAT.problem(path, "it was built with another tokenizer than the model's")
    if vocab_size is not None:
        check_vocabulary(path, header, vocab_size)
    sizes = [header.num_nodes * native.NODE_BYTES, header.table_size * 4]
    nodes, table, tokens = np.split(body, np.cumsum(sizes))
    try:
        return native.NativeArchive(
            nodes, table.view("<i4"), tokens.view("<i4"), header.max_order, header.vocab_size
        )
    except ValueError as error:
        raise FORMAT.problem(path, str(error)) from None
