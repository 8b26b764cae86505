"""The plugin on a patched vLLM: what it registers at vLLM's extension points.

Modules of this folder import names that stock vLLM does not have; they are imported only where
:func:`vllm_trie.vllm_hooks.extension_points.offered` says that the names are there.
"""

from __future__ import annotations

__all__: list[str] = []
