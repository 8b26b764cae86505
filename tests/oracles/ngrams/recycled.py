"""The table of recycled rows of logits in readable Python: the twin of core/recycled.hpp, and of
what core/draft.cpp reads from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import numpy as np

from tests.oracles.ngrams.mixture import ANY_TOKEN, FindRecycled, Recycled, Row
from vllm_trie.drafts import LogitsRows
from vllm_trie.drafts.ngrams import Job
from vllm_trie.drafts.ngrams.native import ROW_TOKENS
from vllm_trie.tree import TokenTree

LEAST_NEWS, LEAST_WEIGHT, UNIT = 0.2, 0.001, 1.0 / 65535

Context = tuple[int, ...]
"""A prompt, or 0, and the last tokens before a row: up to three, of all prompts up to two."""


class RecycledTable:
    """Averages of rows by scope and context; the context with the oldest row is first."""

    def __init__(self, max_contexts: int, max_scopes: int) -> None:
        self._max_contexts = max_contexts
        self._scopes: list[OrderedDict[Context, tuple[int, list[tuple[int, int]]]]] = [
            OrderedDict() for _ in range(max_scopes)
        ]
        self._used: set[int] = set()
        self._hand = 0

    def forget(self, scope: int) -> None:
        self._scopes[scope].clear()
        self._used.discard(scope)

    def find(self, job: Job, last: Sequence[int]) -> Row:
        """Return the row of a context: that of the prompt or else that of all prompts."""
        contexts = self._scopes[job.scope]
        row = contexts.get((0, *last)) if len(last) < 3 else None
        if job.prompt:
            row = contexts.get((job.prompt, *last), row)
        return [(token, units * UNIT) for token, units in row[1]] if row else []

    def observe(self, job: Job) -> FindRecycled:
        """Take in a job's rows; return what finds the contexts at its points."""
        siblings: Row = []
        guesses: Row = []
        if job.rows is not None:
            siblings, guesses = self._take_in(job, job.rows, job.tokens.tolist())
        return partial(self._at, job, siblings, guesses)

    def _at(
        self, job: Job, siblings: Row, guesses: Row, last: Sequence[int], is_root: bool
    ) -> Recycled:
        contexts = [(), *(self.find(job, last[-length:]) for length in (1, 2, 3))]
        if is_root:
            return Recycled(contexts, siblings, guesses)
        before = self.find(job, last[1:3])
        return Recycled(contexts, [], [(t, p) for t, p in before if t != last[-1]])

    def _take_in(self, job: Job, rows: LogitsRows, text: Sequence[int]) -> tuple[Row, Row]:
        base = len(text) - 1 - len(rows.accepted)
        if base < 1:
            return [], []
        contexts = [([ANY_TOKEN] * 3 + list(text[:base]))[-3:]]
        nodes, parents = rows.tree.token_list, rows.tree.parent_list
        for token, parent in zip(nodes, parents, strict=True):
            contexts.append([*contexts[parent + 1][1:], token])
        listed = [
            list(zip(tokens, rates, strict=True))
            for tokens, rates in zip(rows.tokens.tolist(), rows.probabilities.tolist(), strict=True)
        ]
        for last, row in zip(contexts, listed, strict=True):
            if last[-1] >= 0 and row[0][1] > 0:
                for length in (3, 2, 1):
                    if last[-length] == ANY_TOKEN:
                        continue
                    if length < 3:
                        self._add(job.scope, (0, *last[-length:]), row)
                    if job.prompt:
                        self._add(job.scope, (job.prompt, *last[-length:]), row)
        last_accepted = rows.accepted[-1] if rows.accepted else -1
        likely = listed[last_accepted + 1]
        rejected = [
            (node, LEAST_WEIGHT + next((p for t, p in likely if t == token), 0.0))
            for node, token in enumerate(nodes)
            if parents[node] == last_accepted and token != text[-1]
        ]
        total = 0.0
        for _, weight in rejected:
            total += weight
        siblings = [
            (token, weight * rate / total)
            for node, weight in rejected
            for token, rate in listed[node + 1]
        ]
        return siblings, [(token, rate) for token, rate in likely if token != text[-1]]

    def _add(self, scope: int, context: Context, row: Row) -> None:
        contexts = self._scopes[scope]
        if context in contexts:
            contexts.move_to_end(context)
            num_rows, known = contexts[context]
        else:
            self._make_room(scope)
            num_rows, known = 0, []
        num_rows = min(num_rows + 1, round(1 / LEAST_NEWS))
        news = 1.0 / num_rows
        merged = {token: (1.0 - news) * (units * UNIT) for token, units in known}
        for token, rate in row:
            merged[token] = merged.get(token, 0.0) + news * min(max(rate, 0.0), 1.0)
        best = sorted(merged.items(), key=lambda item: -item[1])[:ROW_TOKENS]
        contexts[context] = num_rows, [(token, int(rate / UNIT + 0.5)) for token, rate in best]

    def _make_room(self, scope: int) -> None:
        self._used.add(scope)
        if sum(map(len, self._scopes)) < self._max_contexts:
            return
        share = self._max_contexts // len(self._used)
        if len(self._scopes[scope]) < share:
            while len(self._scopes[self._hand]) <= share:
                self._hand = (self._hand + 1) % len(self._scopes)
            scope = self._hand
        self._scopes[scope].popitem(last=False)


def rows_of(
    listed: Sequence[Row], nodes: Sequence[int], parents: Sequence[int], accepted: Sequence[int]
) -> LogitsRows:
    """Return rows from lists."""
    tokens = [[token for token, _ in row] for row in listed]
    rates = [[rate for _, rate in row] for row in listed]
    tree = TokenTree.from_lists(nodes, parents)
    arrays = np.array(tokens, dtype=np.int32), np.array(rates, dtype=np.float32)
    return LogitsRows(tree, tuple(accepted), *arrays)
