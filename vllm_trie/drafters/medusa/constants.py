"""The blend of the text's n-grams with the heads, as fitted on the shipped model."""

from __future__ import annotations

from vllm_trie.ngrams import Blend, Source

_TEXT = Source(concentration=0.2, discount=0.7)
BLEND = Blend(own=_TEXT, shared=_TEXT, shared_long=_TEXT, min_left_for_heads=1e-6, min_order=1)
"""What is frequent in general, the heads know better: the shortest context is one token.
docs/lab_drafters.md has how the other two numbers were chosen and how little they matter."""
