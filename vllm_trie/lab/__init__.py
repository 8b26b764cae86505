"""The laboratory: what studies an engine or makes files for one, and no engine needs.

The demo, traces as a page, `vllm-trie validate` and `doctor`, the synthesis of corpora, the two
small models, and engines in this process. Nothing outside this folder imports it, except the
command line, when a command asks for it.
"""

__all__: list[str] = []
