"""Texts of ended requests, and where they are kept for other engines."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

PROMPT_BYTES = 8
"""Length of the fingerprint of a prompt's end."""


class StoredText(NamedTuple):
    """The output of a finished request."""

    salt: bytes
    """Digest of its cache salt, empty without one; see :func:`salt_digest`."""
    token_ids: np.ndarray
    """int32 [num_tokens], at least one."""
    prompt: bytes = b""
    """Fingerprint of the end of the prompt that it answered, empty if it is not known."""


class TextStore:
    """Keeps an engine's texts for others, or brings theirs. No call waits for anybody."""

    def restore(self, texts: Callable[[], Sequence[StoredText]]) -> Sequence[StoredText]:
        """Return the texts of earlier engines, least recently used first.

        Args:
            texts: Returns those of this engine in the same order, whenever it is called between two
                steps. Their arrays do not change.
        """
        return ()

    def receive(self, max_tokens: int) -> Sequence[StoredText]:
        """Return texts of other engines that have come in: at least one, if there are any, and no
        more after `max_tokens` tokens."""
        return ()

    def add(self, text: StoredText) -> None:
        """Take in the output of a request that has ended."""

    def listen(self, salt: bytes) -> None:
        """Receive the texts of a cache salt, by its digest, from now on."""

    def forget(self) -> None:
        """Keep nothing that this engine has dropped, its texts and what came in, and receive only
        what is added from now on."""


@functools.lru_cache(maxsize=4096)
def salt_digest(cache_salt: str | None) -> bytes:
    """Return what stands for a cache salt in stores, empty for None."""
    if cache_salt is None:
        return b""
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"vllm-trie cache salt\0" + salt).digest()


def newest(texts: Sequence[StoredText], max_tokens: int) -> Sequence[StoredText]:
    """Return the last texts that have at most `max_tokens` tokens together."""
    left = max_tokens
    for start in range(len(texts) - 1, -1, -1):
        left -= len(texts[start].token_ids)
        if left < 0:
            return texts[start + 1 :]
    return texts
