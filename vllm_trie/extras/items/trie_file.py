"""The file of an item trie (``vllm-trie items build``).

The body of the file (see :mod:`vllm_trie.files.checked_file`) holds the arrays of
:mod:`vllm_trie.extras.items.trie`, all numbers little-endian, the wide ones first:

    values        int64 [items]
    id offsets    int64 [ids + 1]    only if ids are strings
    id_keys       int64 [items]
    first_child   int32 [nodes + 1]
    tokens        int32 [nodes]
    terminals     int32 [items]
    id_order      int32 [items]
    weights       float32 [items]    only if items have some
    id text       uint8[...]        UTF-8, only if ids are strings

The digest shows damage. The trie is checked in addition: a file made to deceive is refused, or its
ids that are strings are not found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, Field

from vllm_trie.extras.items.trie import IdTexts, ItemTrie, find_fault
from vllm_trie.files.checked_file import CheckedFormat, SizedHeader
from vllm_trie.refusal import RefusedError

MAX_NODES = 2**31 - 2
"""Node numbers, and the number of nodes plus one, are int32."""


class ItemsError(RefusedError):
    """A catalogue cannot be built or used. The message names the file, the reason, the remedy."""


class ItemsHeader(SizedHeader):
    """Contents of an item trie's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_items: int = Field(ge=1, le=MAX_NODES)
    num_nodes: int = Field(ge=2, le=MAX_NODES, description="With the root.")
    min_length: int = Field(ge=1, description="Tokens of the shortest item.")
    max_length: int = Field(ge=1, description="Tokens of the longest item.")
    max_token: int = Field(ge=0, le=2**31 - 1)
    max_children: int = Field(ge=1, description="Most children that a node has.")
    ids: Literal["int", "str"] = Field(description="Type of the items' ids.")
    num_ids: int = Field(default=0, ge=0, description="Ids that are strings.")
    id_bytes: int = Field(default=0, ge=0)
    weights: bool = Field(default=False, description="Whether items have weights.")
    tokenizer: str | None = Field(
        default=None, description="Fingerprint of the tokenizer; None if none was named."
    )

    @property
    def sections(self) -> list[tuple[str, int]]:
        """Type and length of the arrays, in order."""
        texts = self.ids == "str"
        return [
            ("<i8", self.num_items),
            ("<i8", self.num_ids + 1 if texts else 0),
            ("<i8", self.num_items),
            ("<i4", self.num_nodes + 1),
            ("<i4", self.num_nodes),
            ("<i4", self.num_items),
            ("<i4", self.num_items),
            ("<f4", self.num_items if self.weights else 0),
            ("u1", self.id_bytes),
        ]

    @property
    def body_size(self) -> int:
        return sum(np.dtype(kind).itemsize * length for kind, length in self.sections)


FORMAT = CheckedFormat(
    kind="catalogue",
    magic=b"VTRIEITM",
    version=2,
    header=ItemsHeader,
    error=ItemsError,
    remedy="build it with `vllm-trie items build`",
)
read_header = FORMAT.read_header


def open_items(path: Path, vocab_size: int | None = None, version: str | None = None) -> ItemTrie:
    """Check a whole file and copy it to memory.

    Args:
        path: The file, or the `memory` of a catalogue that another process uses.
        vocab_size: Of the target model; None: not compared.
        version: Version that was checked before. The file must be that version; its trie is not
            checked again.

    Raises:
        ItemsError: The file is missing, of another kind or version, truncated, changed since it
            was written, no sound trie, or has tokens outside the vocabulary.
    """
    header, digest, body, memory = FORMAT.read(path, check=version is None)
    if version is not None and digest.hex() != version:
        raise FORMAT.problem(path, f"it is version {digest.hex()[:16]}, not {version[:16]}")
    if vocab_size is not None:
        check_vocabulary(path, header, vocab_size)
    parts = []
    begin = 0
    for kind, length in header.sections:
        end = begin + np.dtype(kind).itemsize * length
        parts.append(body[begin:end].view(kind).view(np.ndarray))
        begin = end
    values, offsets, keys, first_child, tokens, terminals, order, weights, text = parts
    id_texts = IdTexts(offsets, text) if header.ids == "str" else None
    trie = ItemTrie(
        first_child,
        tokens,
        terminals,
        values,
        keys,
        order,
        weights if header.weights else None,
        id_texts,
        header.max_length,
        digest.hex(),
        (float(weights.min()), float(weights.max())) if header.weights else (0.0, 0.0),
        memory,
        header.tokenizer,
        path,
    )
    if version is not None:
        return trie
    fault = find_fault(trie)
    if fault is None and tokens.max() != header.max_token:
        fault = "its largest token is not that of the header"
    if fault is not None:
        raise FORMAT.problem(path, fault)
    return trie


def check_tokenizer(path: Path, built_with: str | None, tokenizer: str | None, whose: str) -> None:
    """Refuse a trie of another tokenizer, where both fingerprints are known.

    Args:
        built_with, tokenizer: Fingerprints, of the trie's tokenizer and of the other one.
        whose: The other one, in the message.

    Raises:
        ItemsError: They differ.
    """
    if None not in (built_with, tokenizer) and built_with != tokenizer:
        raise FORMAT.problem(path, f"it was built with another tokenizer than {whose}")


def check_vocabulary(path: Path, header: ItemsHeader, vocab_size: int) -> None:
    """Refuse a trie with tokens that a model does not have.

    Raises:
        ItemsError: The largest token is outside the vocabulary.
    """
    if header.max_token >= vocab_size:
        raise FORMAT.problem(
            path,
            f"it has token {header.max_token}, the model's vocabulary has {vocab_size} tokens",
        )
