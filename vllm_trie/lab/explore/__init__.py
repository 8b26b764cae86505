"""A page that shows a generation step by step, and the recording of traces for it.

Importing this package imports neither torch nor vLLM.
"""

from vllm_trie.lab.explore.page import page

__all__ = ["page"]
