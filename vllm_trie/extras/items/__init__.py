"""Catalogues of items: which token sequences a constrained search may generate.

:class:`ItemTrie` is a catalogue in memory, :func:`open_items` maps one from its file, and
:func:`build_items` writes the file of the items that :func:`read_items` reads. :class:`Rules` are
what one request allows and denies.
"""

from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.selection import Rules
from vllm_trie.extras.items.sources import read_items
from vllm_trie.extras.items.trie import ROOT, ItemId, ItemTrie
from vllm_trie.extras.items.trie_file import ItemsError, ItemsHeader, open_items, read_header

__all__ = [
    "ROOT",
    "ItemId",
    "ItemTrie",
    "ItemsError",
    "ItemsHeader",
    "Rules",
    "build_items",
    "open_items",
    "read_header",
    "read_items",
]
