"""Beam search as a pure algorithm: no model, no cache, no vLLM.

:class:`BeamSearch` is the search, :class:`SearchSettings` its settings. The same search, written to
be read, is ``tests/unit/beam/reference.py``.
"""

from vllm_trie.searches.candidates import Candidates, Draws, Outcomes
from vllm_trie.searches.search import BeamSearch, Children, Hypothesis
from vllm_trie.searches.settings import (
    MAX_LENGTH_PENALTY,
    BeamOptions,
    SearchSettings,
    parse_options,
)
from vllm_trie.searches.trace import SearchTrace

__all__ = [
    "MAX_LENGTH_PENALTY",
    "BeamOptions",
    "BeamSearch",
    "Candidates",
    "Children",
    "Draws",
    "Hypothesis",
    "Outcomes",
    "SearchSettings",
    "SearchTrace",
    "parse_options",
]
