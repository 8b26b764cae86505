"""Token tries for vLLM: tree speculative decoding and beam search whose branches share KV.

The plugin registers itself with vLLM through the entry point group ``vllm.general_plugins``;
nothing has to be imported to use it. Importing this package is cheap and touches neither
torch nor vLLM.
"""

from vllm_trie._version import __version__

__all__ = ["__version__"]
