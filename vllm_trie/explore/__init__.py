"""A page that shows a generation step by step, and the traces that it is made of.

Importing this package imports neither torch nor vLLM.
"""

from vllm_trie.explore.page import page
from vllm_trie.explore.trace import Header, Step, Trace

__all__ = ["Header", "Step", "Trace", "page"]
