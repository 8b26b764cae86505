"""The laboratory's groups of the `vllm-trie` command, each imported when it is called."""

__all__: list[str] = []
