"""What was tried on the way to the default scoring, for replay.py: docs/ngram_trie.md tells.

Each variant changes one thing in the Python twin of the default; `variant_default` changes nothing
and must measure the same as `ngram_trie` (and `variant_default_store` as `ngram_trie_store`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
from vllm_trie.drafters.ngram_trie.backend import Backend, PythonBackend
from vllm_trie.drafters.ngram_trie.blended import Blend, give_shares
from vllm_trie.drafters.ngram_trie.constants import CUT_LEFT, MIN_LEFT, OWN, SHARED, Source
from vllm_trie.drafters.ngram_trie.contexts import Counted, Match, count_successors
from vllm_trie.drafters.ngram_trie.index import NgramIndex, Node

from vllm_trie.drafters import DraftRequest
from vllm_trie.drafters.ngram_trie.drafter import BlendedScoring
from vllm_trie.drafters.ngram_trie.options import NgramTrieOptions
from vllm_trie.tree import TokenTree


class RawCountIndex(NgramIndex):
    """Every context counts every occurrence, instead of Kneser-Ney's distinct predecessors."""

    def is_new_type(self, longer_is_new: bool, order: int) -> bool:
        return True


class RawCountBackend(PythonBackend):
    def new_index(self, max_order: int) -> NgramIndex:
        return RawCountIndex(max_order)


class Stepwise(Blend):
    """The default's prediction, with what the variants below change as methods of their own."""

    def predict(
        self,
        sources: Sequence[tuple[NgramIndex, Source]],
        contexts: Sequence[list[Match]],
        cut: float,
    ) -> dict[int, float]:
        successors: dict[int, float] = {}
        left = 1.0
        longest = max(len(known) for known in contexts) - 1
        for order in range(longest, -1, -1):
            if left < max(MIN_LEFT, CUT_LEFT * cut):
                break
            for source, counted in self.heard_before(order, longest, sources, contexts):
                left = give_shares(counted, source, left, cut, successors)
            for i, ((index, source), known) in enumerate(zip(sources, contexts, strict=True)):
                if order < len(known):
                    source = self.source_of(i, order, source)
                    counted = self.count(i, index, known[order])
                    left = give_shares(counted, source, left, cut, successors)
        return successors

    def source_of(self, i: int, order: int, source: Source) -> Source:
        """Parameters of source `i` for contexts of `order` tokens."""
        return source

    def count(self, i: int, index: NgramIndex, match: Match) -> Counted:
        """What followed a context of source `i`."""
        return count_successors(index, match)

    def heard_before(
        self,
        order: int,
        longest: int,
        sources: Sequence[tuple[NgramIndex, Source]],
        contexts: Sequence[list[Match]],
    ) -> list[tuple[Source, Counted]]:
        """What has a say before the contexts of `order` tokens."""
        return []


class ByLength(Stepwise):
    """Parameters for each context length, found by a random search over the whole shared half."""

    own_by_length = (
        (1.0, 0.6, 1.4, 0.4, 1.2, 1.2, 0.5, 0.5, 0.4),
        (0.8, 0.73, 0.45, 0.63, 0.73, 0.73, 0.6, 0.6, 0.52),
    )
    shared_by_length = (
        (19.7, 3.5, 5.0, 5.0, 5.0, 5.0, 7.0, 7.0, 3.6),
        (0.95, 0.8, 0.8, 0.87, 0.5, 0.5, 0.8, 0.8, 0.8),
    )

    def source_of(self, i: int, order: int, source: Source) -> Source:
        concentrations, discounts = self.shared_by_length if i else self.own_by_length
        return Source(concentrations[order], discounts[order])


class Recency(Stepwise):
    """The successor that was seen last in a context counts once more."""

    def count(self, i: int, index: NgramIndex, match: Match) -> Counted:
        counted = count_successors(index, match)
        if i or not isinstance(index, TimedIndex) or not _has_children(match):
            return counted
        newest = max(match.hot, key=lambda node: index.last_seen.get(node, -1)).token
        likeliest = [(t, c + (t == newest)) for t, c in counted.likeliest]
        return Counted(likeliest, counted.num_types + 1, counted.num_successors)


def _has_children(match: Match) -> TypeGuard[Node]:
    return isinstance(match, Node) and match.once is None and bool(match.hot)


class TimedIndex(NgramIndex):
    """Notes when each n-gram was seen last."""

    def __init__(self, max_order: int) -> None:
        super().__init__(max_order)
        self.last_seen: dict[Node, int] = {}

    def _append(self, token: int) -> None:
        before = list(self._open)
        super()._append(token)
        for context in before:
            child = context.children.get(token)
            if child is not None:
                self.last_seen[child] = self.num_tokens


class TimedBackend(PythonBackend):
    def new_index(self, max_order: int) -> NgramIndex:
        return TimedIndex(max_order)


class Gapped(Stepwise):
    """When no context of two tokens is known, contexts with the last token left open have a say:
    what followed the token that followed the tokens before it."""

    min_length = 3
    gap = Source(concentration=2.0, discount=0.8)

    def match_suffix(self, index: NgramIndex, token_ids: Sequence[int]) -> list[Match]:
        found = _WithPrevious(super().match_suffix(index, token_ids))
        found.previous = super().match_suffix(index, token_ids[:-1])
        return found

    def advance(self, index: NgramIndex, contexts: list[Match], token: int) -> list[Match]:
        longer = _WithPrevious(super().advance(index, contexts, token))
        longer.previous = contexts
        return longer

    def heard_before(
        self,
        order: int,
        longest: int,
        sources: Sequence[tuple[NgramIndex, Source]],
        contexts: Sequence[list[Match]],
    ) -> list[tuple[Source, Counted]]:
        if order != min(2, longest):
            return []
        return [
            (self.gap, self.count_over_gap(index, known.previous))  # type: ignore[attr-defined]
            for (index, _), known in zip(sources, contexts, strict=True)
        ]

    def count_over_gap(self, index: NgramIndex, previous: list[Match]) -> Counted:
        """What came two tokens after the longest context that ends before the last token."""
        for order in range(len(previous) - 1, self.min_length - 1, -1):
            found: dict[int, int] = {}
            for token, _ in count_successors(index, previous[order]).likeliest[:8]:
                after = super().advance(index, [previous[order]], token)[1]
                for successor, types in count_successors(index, after).likeliest[:4]:
                    found[successor] = found.get(successor, 0) + types
            if found:
                likeliest = sorted(found.items(), key=lambda item: -item[1])
                return Counted(likeliest, sum(found.values()), len(found))
        return Counted([], 0, 0)


class _WithPrevious(list):
    """The contexts at a point, and those one token before it."""

    previous: list[Match]


class StoredPrompts(BlendedScoring):
    """The store takes in prompts too."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        trees = super().propose(requests)
        for request in requests:
            self._states[request.request_id].output = request.token_ids.copy()
        return trees


class Variant:
    """A method of replay.py around one scoring."""

    def __init__(self, scoring: BlendedScoring, num_nodes: int) -> None:
        self._scoring = scoring
        self._num_nodes = num_nodes

    def draft(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> TokenTree:
        request = DraftRequest(request_id, tokens, num_prompt_tokens, self._num_nodes, 1 << 20)
        [tree] = self._scoring.propose([request])
        return tree

    def finish(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        self._scoring.release(request_id)


def _blend(kind: type[Blend] = Blend, **parameters: object) -> Blend:
    blend = kind()
    for name, value in parameters.items():
        setattr(blend, name, value)
    return blend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "variant_default": PythonBackend,
    "variant_raw_counts": RawCountBackend,
    "variant_parameters_by_length": lambda: PythonBackend(ByLength()),
    "variant_no_path_trust": lambda: PythonBackend(_blend(path_trust=0.0)),
    "variant_less_discount": lambda: PythonBackend(_blend(own=OWN._replace(discount=0.5))),
    "variant_more_concentration": lambda: PythonBackend(
        _blend(own=OWN._replace(concentration=2.0))
    ),
    "variant_store_believed_as_own_text": lambda: PythonBackend(_blend(shared=OWN)),
    "variant_store_believed_less": lambda: PythonBackend(
        _blend(shared=SHARED._replace(concentration=16.0))
    ),
    "variant_recency": lambda: TimedBackend(Recency()),
    "variant_gapped_contexts": lambda: PythonBackend(Gapped()),
}
CONTEXT_LENGTHS = (2, 4, 6, 12)


def variants() -> dict[str, Callable[[int, int], Variant]]:
    """name -> what makes the method; each also with `_store`."""
    found: dict[str, Callable[[int, int], Variant]] = {}

    def add(name: str, backend: Callable[[], Backend], **options: int) -> None:
        for suffix, tokens in (("", 0), ("_store", 1 << 18)):
            chosen = NgramTrieOptions(store_tokens=tokens, **options)  # type: ignore[arg-type]
            found[name + suffix] = lambda n, _, chosen=chosen: Variant(
                BlendedScoring(chosen, backend()), n
            )

    for name, backend in BACKENDS.items():
        add(name, backend)
    for length in CONTEXT_LENGTHS:
        add(f"variant_context_{length}", PythonBackend, max_context_len=length)
    found["variant_prompts_in_store"] = lambda n, _: Variant(
        StoredPrompts(NgramTrieOptions(), PythonBackend()), n
    )
    return found
