"""Drafters, which fill token trees, and the registry of drafting methods."""

from vllm_trie.drafts.drafter import (
    Drafter,
    DrafterContext,
    DrafterOptions,
    DraftRequest,
    LogitsRows,
    PreparedDrafts,
    VerifiedStep,
)
from vllm_trie.drafts.registry import (
    ENTRY_POINT_GROUP,
    available_methods,
    get_drafter_class,
    parse_options,
    register,
    unregister,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "DraftRequest",
    "Drafter",
    "DrafterContext",
    "DrafterOptions",
    "LogitsRows",
    "PreparedDrafts",
    "VerifiedStep",
    "available_methods",
    "get_drafter_class",
    "parse_options",
    "register",
    "unregister",
]
