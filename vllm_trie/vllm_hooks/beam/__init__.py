"""Native beam search inside vLLM: schedulers, front-end hooks and their ledger lines."""

from __future__ import annotations

from vllm_trie.vllm_hooks.beam.hooks import BEAM_HOOKS

__all__ = ["BEAM_HOOKS", "install"]


def install() -> None:
    """Put native beam search into the vLLM of this process; idempotent."""
    from vllm_trie.vllm_hooks.beam.installing import install as install_hooks

    install_hooks()
