"""Every symbol of vLLM that the plugin touches, in one table, and the code that patches vLLM.

vLLM's internals are no stable interface. :func:`entries` says which symbol is touched, why, and
when the entry can go; overrides and replacements record themselves. :func:`check` compares the
table with the installed vLLM, :func:`install` puts a feature's patches in place, :func:`undo` takes
them out. Importing this package imports no module of vLLM's, and nothing outside of it assigns to
an attribute of vLLM's modules and classes.
"""

from vllm_trie.hooks.ledger.entry import Entry, Feature, resolve
from vllm_trie.hooks.ledger.installation import install, installed, patches_in_place, undo
from vllm_trie.hooks.ledger.table import (
    SUPPORTED_VLLM_VERSIONS,
    TRIAL_SWITCH,
    Finding,
    check,
    entries,
    is_unlisted,
    mismatch,
)

__all__ = [
    "SUPPORTED_VLLM_VERSIONS",
    "TRIAL_SWITCH",
    "Entry",
    "Feature",
    "Finding",
    "check",
    "entries",
    "install",
    "installed",
    "is_unlisted",
    "mismatch",
    "patches_in_place",
    "resolve",
    "undo",
]
