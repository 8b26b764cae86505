"""What the model named after the nodes of verified trees, kept for later trees."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import count

import numpy as np

from vllm_trie.drafters.base import DraftRequest
from vllm_trie.ngrams import Backend
from vllm_trie.store import salt_digest

SIZE_LOG2 = 18
"""Of the table's number of contexts; a context takes 32 bytes."""
MAX_SCOPES = 1 << 16


class Recycling:
    """The table of recycled successors, and the scopes of its contexts.

    Each cache salt is a scope of the table, so a request draws on what requests with the same salt
    made the model say, and on nothing else. Of many salts, the one used longest ago is forgotten.
    """

    def __init__(self, backend: Backend) -> None:
        self.table = backend.new_recycled(SIZE_LOG2)
        self._scopes: OrderedDict[bytes, int] = OrderedDict()  # by the salt's digest
        self._numbers = count()  # a scope that was forgotten is never used again

    def scope(self, cache_salt: str | None) -> int:
        """Return the scope of a salt."""
        salt = salt_digest(cache_salt)
        scope = self._scopes.get(salt)
        if scope is None:
            scope = self._scopes[salt] = next(self._numbers)
            if len(self._scopes) > MAX_SCOPES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(salt)
        return scope

    def observe(self, requests: Sequence[DraftRequest], num_tokens: Sequence[int]) -> None:
        """Take in the last verification of each request; its draft continued `num_tokens` tokens.

        The table is called once for each salt of the batch.
        """
        by_salt: defaultdict[str | None, list[np.ndarray]] = defaultdict(list)
        for request, length in zip(requests, num_tokens, strict=True):
            rows = None if request.last_step is None else observed_rows(request, length)
            if rows is not None and len(rows):
                by_salt[request.cache_salt].append(rows)
        for salt, of_salt in by_salt.items():
            self.table.observe(self.scope(salt), np.concatenate(of_salt))


def observed_rows(request: DraftRequest, num_tokens: int) -> np.ndarray | None:
    """Return int32 [rows, 3]: the last two tokens of each context of the last verification, and the
    model's argmax after it; None if it is not known or is not of a draft after `num_tokens`
    tokens."""
    assert request.last_step is not None
    tree, accepted, argmax = request.last_step
    tokens = request.token_ids
    if argmax is None or num_tokens < 2 or len(argmax) != tree.num_nodes + 1:
        return None
    path = tree.token_ids[list(accepted)]
    if not np.array_equal(tokens[num_tokens : num_tokens + len(path)], path):
        return None
    rows = np.empty((len(argmax), 3), dtype=np.int32)
    rows[0, :2] = tokens[num_tokens - 2 : num_tokens]
    rows[1:, 1] = tree.token_ids
    rows[1:, 0] = rows[tree.parents + 1, 1]  # ROOT is -1, and the root's row is the first
    rows[:, 2] = argmax
    return rows[argmax >= 0]
