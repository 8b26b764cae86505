"""The interface of drafters, for packages that bring one of their own."""

from vllm_trie.drafts import *  # noqa: F403
from vllm_trie.drafts import __all__ as __all__
