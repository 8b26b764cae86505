"""The commands `vllm-trie corpus`: corpora out of texts, and out of the model itself."""

__all__: list[str] = []
