"""Files of what engines have learned, from which later ones start warm."""

from __future__ import annotations

from vllm_trie.store.folder import (
    Identity,
    SharedFolder,
    Slot,
    merge_texts,
)
from vllm_trie.store.store_file import (
    MAX_TOKENS,
    Store,
    StoredText,
    StoreError,
    StoreHeader,
    newest,
    read_header,
    read_store,
    salt_digest,
    write_store,
)

__all__ = [
    "MAX_TOKENS",
    "Identity",
    "SharedFolder",
    "Slot",
    "Store",
    "StoreError",
    "StoreHeader",
    "StoredText",
    "merge_texts",
    "newest",
    "read_header",
    "read_store",
    "salt_digest",
    "write_store",
]
