"""Checks of the folder and the server, before the engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.drafts import get_drafter_class
from vllm_trie.drafts.engine import config
from vllm_trie.extras.memory.options import MemoryOptions
from vllm_trie.extras.memory.replicas import connect
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_store(vllm_config: VllmConfig) -> None:
    """Refuse a store that no drafter fills, or that cannot be.

    Raises:
        RefusedError: Naming the option.
    """
    tree_config = config.read(vllm_config)
    if tree_config is None:
        return
    method, options = tree_config.method, tree_config.engine_options
    assert isinstance(options, MemoryOptions)
    given = [name for name in ("store", "store_path") if getattr(options, name) is not None]
    if given and not get_drafter_class(method).keeps_texts(tree_config.drafter_options):
        raise RefusedError(
            f"{' and '.join(given)}: method {method!r} with these options keeps no texts of ended "
            "requests; leave it out, or take ngram_trie with store_tokens above 0"
        )
    if options.store is not None:
        connect(options.store).close()
    store_path = options.store_path
    folder = None if store_path is None else Path(store_path)
    if folder is None or (store_path and folder.is_dir()):
        return
    if folder.exists() or not folder.parent.is_dir():
        raise RefusedError(
            f"store_path={store_path!r} must be a folder, or a new one in an existing folder; "
            "create it, or leave store_path out"
        )
