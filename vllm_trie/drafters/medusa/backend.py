"""The choice between the compiled selection and its Python twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from vllm_trie.drafters.medusa import native, selection
from vllm_trie.drafters.medusa.selection import Job
from vllm_trie.tree import TokenTree


class Backend(Protocol):
    """What the modules `native` and `selection` offer.

    Both choose the same trees, bit for bit, from the same candidates.
    """

    def new_index(self, max_order: int) -> Any:
        """Return an index of a text that is empty yet."""

    def select_batch(
        self, tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
    ) -> list[TokenTree]:
        """Return the tree of every job; updates the jobs' indexes.

        Args:
            tokens, probabilities: int32 and float32 [jobs, K, m], contiguous: each head's
                candidates, likeliest first, all different.
        """


def choose_backend() -> Backend:
    """Return the compiled selection if it can be compiled, else the Python one (the reason is
    logged)."""
    return native if native.is_available() else selection
