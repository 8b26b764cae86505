"""The demo: speculation at work on real prompts, measured beside plain vLLM.

Importing this package imports neither torch nor vLLM; thread settings must come before them.
"""

from __future__ import annotations

from vllm_trie.demo.command import main

__all__ = ["main"]
