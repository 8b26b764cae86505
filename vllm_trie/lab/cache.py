"""The folder for files that the laboratory downloads or makes once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `VLLM_TRIE_CACHE_DIR`, or a folder below `XDG_CACHE_HOME` or `~/.cache`; makes it."""
    chosen = os.environ.get("VLLM_TRIE_CACHE_DIR")
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(chosen) if chosen else Path(general).expanduser() / "vllm_trie"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
