"""The version of the package, read by the build and by ``vllm-trie --version``."""

__version__ = "0.5.0"
