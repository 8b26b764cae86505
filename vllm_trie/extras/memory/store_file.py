"""The file of a warm start: texts of finished requests.

The body of the file (see :mod:`vllm_trie.files.checked_file`), all integers little-endian:

    lengths     int32 [texts]        least recently used first
    salts       int32 [texts]        number of the salt's digest, -1 for texts without a salt
    tokens      int32 [tokens]       of all texts
    digests     uint8 [salts, 32]
    prompts     uint8 [prompts, 8]   of each text; or none

The digest shows damage. The content is checked in addition, so that a file made to deceive costs
drafts at most. It holds text of users, readable by whoever may read the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from vllm_trie.drafts.text_store import PROMPT_BYTES, StoredText, newest
from vllm_trie.files.checked_file import CheckedFormat, SizedHeader
from vllm_trie.refusal import RefusedError

MAX_TOKENS = 1 << 22
"""Most tokens of a file, 16 MiB; of a larger store, those used last are kept."""
_SALT_BYTES = hashlib.sha256().digest_size
_NO_PROMPT = bytes(PROMPT_BYTES)
_TEXTS_AT_ONCE = 256
_NO_SALT = b""


class StoreError(RefusedError):
    """A store file cannot be used. The message names the file, the reason and the remedy."""


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


class StoreHeader(SizedHeader):
    """Contents of a store file. Fields of other versions of this package are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = Field(description="Name or path of the model whose outputs these are.")
    tokenizer: str = Field(description="Fingerprint of its tokenizer, empty if there is none.")
    vocab_size: int = Field(ge=1, le=2**31 - 1)
    saved_at: float = Field(allow_inf_nan=False, description="Seconds since 1970.")
    num_texts: int = Field(default=0, ge=0, le=MAX_TOKENS)
    num_salts: int = Field(default=0, ge=0, le=MAX_TOKENS)
    num_prompts: int = Field(default=0, ge=0, le=MAX_TOKENS, description="None, or num_texts.")
    num_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)

    @property
    def body_size(self) -> int:
        integers = 4 * (2 * self.num_texts + self.num_tokens)
        return integers + _SALT_BYTES * self.num_salts + PROMPT_BYTES * self.num_prompts


FORMAT = CheckedFormat(
    kind="store",
    magic=b"VTRIESTR",
    version=1,
    header=StoreHeader,
    error=StoreError,
    remedy="delete it; engines write new ones",
    private=True,
)
read_header = FORMAT.read_header


def write_store(path: Path, header: StoreHeader, texts: Sequence[StoredText]) -> None:
    """Write a file of mode 0600; an older one is replaced once the new one is complete.

    Args:
        header: The numbers of texts, salts and tokens are filled in.
        texts: Least recently used first. Of too many, the last ones are kept.

    Raises:
        OSError: The file cannot be written.
    """
    texts = newest(texts, MAX_TOKENS)
    prompts = [text.prompt or _NO_PROMPT for text in texts]
    if all(prompt == _NO_PROMPT for prompt in prompts):
        prompts = []
    salts = {salt: i for i, salt in enumerate(dict.fromkeys(t.salt for t in texts if t.salt))}
    lengths = np.array([len(text.token_ids) for text in texts], dtype="<i4")
    numbers = np.array([salts.get(text.salt, -1) for text in texts], dtype="<i4")
    counts = {
        "num_texts": len(texts),
        "num_salts": len(salts),
        "num_prompts": len(prompts),
        "num_tokens": int(lengths.sum()),
    }

    def body() -> Iterator[bytes]:
        yield lengths.tobytes()
        yield numbers.tobytes()
        # In small parts: an engine's thread waits for each of them.
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            some = [text.token_ids for text in texts[start : start + _TEXTS_AT_ONCE]]
            yield np.concatenate(some).astype("<i4").tobytes()
        yield b"".join(salts)
        yield b"".join(prompts)

    FORMAT.write(path, header.model_copy(update=counts), body())


def read_store(path: Path, identity: Identity | None = None) -> list[StoredText]:
    """Check a whole file and return its texts, least recently used first.

    Args:
        identity: What the file must have; None for any.

    Raises:
        StoreError: The file is missing, of another kind, version or identity, truncated, changed
            since it was written, or not sound.
    """
    header, _, body, _ = FORMAT.read(path)
    if identity not in (None, Identity(header.model, header.tokenizer, header.vocab_size)):
        raise FORMAT.problem(path, "it is that of another model or tokenizer")
    salt_bytes = _SALT_BYTES * header.num_salts
    sizes = [4 * header.num_texts, 4 * header.num_texts, 4 * header.num_tokens, salt_bytes]
    *parts, digests, prompts = np.split(body, np.cumsum(sizes))
    lengths, numbers, tokens = (part.view("<i4") for part in parts)
    if (lengths < 1).any() or lengths.sum(dtype=np.int64) != header.num_tokens:
        raise FORMAT.problem(path, "the lengths of its texts are not those of its tokens")
    if ((numbers < -1) | (numbers >= header.num_salts)).any():
        raise FORMAT.problem(path, "it names salts that it does not have")
    if ((tokens < 0) | (tokens >= header.vocab_size)).any():
        raise FORMAT.problem(path, "it has tokens outside its vocabulary")
    if header.num_prompts not in (0, header.num_texts):
        raise FORMAT.problem(path, "it does not have one prompt a text")
    salts = [*map(bytes, digests.reshape(-1, _SALT_BYTES)), _NO_SALT]
    marks = [bytes(mark) if mark.any() else b"" for mark in prompts.reshape(-1, PROMPT_BYTES)]
    ends = np.cumsum(lengths, dtype=np.int64)
    return [
        # A copy of the tokens: texts leave the store one by one.
        StoredText(salts[number], tokens[end - length : end].astype(np.int32), mark)
        for number, length, end, mark in zip(
            numbers.tolist(),
            lengths.tolist(),
            ends.tolist(),
            marks or [b""] * header.num_texts,
            strict=True,
        )
    ]
