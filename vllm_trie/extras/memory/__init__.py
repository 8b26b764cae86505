"""Files of what engines have learned, from which later ones start warm."""

from vllm_trie.extras.memory.folder import KEY_BYTES, Identity, Slot, prompt_key, read_newest
from vllm_trie.extras.memory.store_file import (
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
    "Slot",
    "Store",
    "StoreError",
    "StoreHeader",
    "StoredText",
    "newest",
    "prompt_key",
    "read_header",
    "read_newest",
    "read_store",
    "salt_digest",
    "write_store",
]
