"""Files of what engines have learned, from which later ones start warm."""

from vllm_trie.store.folder import (
    KEY_BYTES,
    Identity,
    SharedFolder,
    Slot,
    merge_texts,
    prompt_key,
)
from vllm_trie.store.store_file import (
    MAX_TOKENS,
    PROMPT_BYTES,
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
    "KEY_BYTES",
    "MAX_TOKENS",
    "PROMPT_BYTES",
    "Identity",
    "SharedFolder",
    "Slot",
    "Store",
    "StoreError",
    "StoreHeader",
    "StoredText",
    "merge_texts",
    "newest",
    "prompt_key",
    "read_header",
    "read_store",
    "salt_digest",
    "write_store",
]
