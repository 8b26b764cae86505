"""The ledger's lines for native beam search."""

from __future__ import annotations

from vllm_trie.vllm_hooks.ledger import Hook

BEAM_HOOKS: tuple[Hook, ...] = ()
