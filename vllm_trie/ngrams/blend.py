"""Blended back-off in readable Python: the twin of core/draft.cpp, and its fallback.

The probability of the next token blends contexts of every length, in every source, the longest
first: with n successors counted after a context, u of them distinct, successor t of count c gets
(c - d) / (n + theta) of the probability that is left, and (theta + d·u) / (n + theta) is passed on
to the next shorter context. This is the predictive rule of the hierarchical Pitman-Yor process with
one table a type, that is, interpolated Kneser-Ney smoothing. A model's heads, if there are any, are
its base distribution: they get what no context has claimed.

Source: Teh, "A hierarchical Bayesian language model based on Pitman-Yor processes" (2006), eq. 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_trie.ngrams.best_first import BestFirstTree
from vllm_trie.ngrams.contexts import Counted, Match, advance, count_successors, match_suffix
from vllm_trie.ngrams.index import NgramIndex
from vllm_trie.ngrams.recycled import ANY_TOKEN
from vllm_trie.tree import ROOT

Counts = list[tuple[int, int]]
"""(token, times that it was counted), most often first."""


class Source(NamedTuple):
    """Trust in the counts of a source: the parameters of a Pitman-Yor process, the same for every
    length of context."""

    concentration: float
    """theta: pseudo-observations of "something else", at least 0."""
    discount: float
    """d: taken off each successor's count, in [0, 1)."""


class Blend(NamedTuple):
    """Parameters of a blend."""

    own: Source
    """The request's own text."""
    shared: Source
    """Finished requests and the corpus."""
    shared_long: Source
    """Their contexts of `long_order` tokens and more: a text that repeats one of them at length
    goes on repeating it."""
    recycled: Source = Source(concentration=2.0, discount=0.5)
    """What the model named after nodes of earlier trees; asked before the empty context."""
    path_trust: float = 0.0
    """Added certainty, once a parent was accepted, that the text repeats itself. Odds of small
    probabilities grow by this part."""
    min_left: float = 0.0
    """Shorter contexts are asked while at least this much probability is left."""
    cut_left: float = 0.0
    cut_share: float = 0.0
    """Once a tree has enough guesses, a successor needs some probability to be chosen. Contexts are
    not asked when less than `cut_left` of that is left; shares below `cut_share` of it are left
    out."""
    min_left_for_heads: float = 0.0
    """Heads are asked if at least this much probability is left."""
    long_order: int = 8
    min_order: int = 0
    """Length of the shortest context that is asked."""
    use_length: int = 3
    """A match of this many tokens counts as a use of the stored text in which it was found."""

    def source(self, index: int, order: int) -> Source:
        """Return the trust in contexts of a length in an index; the first is the own text's."""
        if index == 0:
            return self.own
        return self.shared if order < self.long_order else self.shared_long


def grow(
    tree: BestFirstTree,
    indexes: Sequence[NgramIndex],
    token_ids: Sequence[int],
    blend: Blend,
    heads: Sequence[Sequence[tuple[int, float]]] = (),
    recycled: Callable[[int, int], list[Counts]] | None = None,
) -> list[list[Match]]:
    """Fill a tree with the likeliest continuations of `token_ids`.

    Args:
        tree: empty.
        indexes: sources in the order in which they are believed; the first is the request's own
            text, the others are shared.
        token_ids: the text that is continued.
        heads: each head's candidates and their probabilities, the likeliest first.
        recycled: returns the successors of recycled contexts that end in two given tokens, by
            context, the longer one first.

    Returns:
        The contexts at the end of the text, by source and length.
    """
    # By number of the chosen guess at whose end they stand.
    contexts = {ROOT: [match_suffix(index, token_ids) for index in indexes]}

    def last_two(parent: int) -> tuple[int, int]:
        path: list[int] = []
        while parent != ROOT and len(path) < 2:
            path.insert(0, tree.chosen[parent].token)
            parent = tree.chosen[parent].parent
        before, last = ([ANY_TOKEN] * 2 + list(token_ids[-2:]) + path)[-2:]
        return before, last

    def expand(above: float, parent: int, depth: int) -> None:
        found = [] if recycled is None else recycled(*last_two(parent))
        shares, left = ask_contexts(indexes, contexts[parent], blend, tree.bound() / above, found)
        if depth <= len(heads) and left >= blend.min_left_for_heads:
            for token, probability in heads[depth - 1]:
                shares[token] = shares.get(token, 0.0) + left * probability
        for token, share in shares.items():
            trust = blend.path_trust if depth > 1 else 0.0
            probability = share * ((1.0 + trust) / (1.0 + trust * share)) if trust else share
            tree.discover(above * probability, token, parent, depth)

    expand(1.0, ROOT, 1)
    while guess := tree.choose():
        if tree.may_grow():
            number = len(tree.chosen) - 1
            contexts[number] = [
                advance(index, known, guess.token)
                for index, known in zip(indexes, contexts[guess.parent], strict=True)
            ]
            expand(guess.probability, number, guess.depth + 1)
    return contexts[ROOT]


def ask_contexts(
    indexes: Sequence[NgramIndex],
    contexts: Sequence[list[Match]],
    blend: Blend,
    cut: float,
    recycled: Sequence[Counts] = (),
) -> tuple[dict[int, float], float]:
    """Return the contexts' shares of each successor's probability, and what they leave.

    Args:
        cut: probability below which a successor cannot be chosen; some of those are left out.
        recycled: successors by recycled context, that of two tokens first.
    """
    successors: dict[int, float] = {}
    left = 1.0
    longest = max((len(known) - 1 for known in contexts), default=-1)
    if any(recycled):
        longest = max(longest, 0)
    for order in range(longest, blend.min_order - 1, -1):
        if left < max(blend.min_left, blend.cut_left * cut):
            break
        counted = []
        if order == 0:
            for counts in recycled:
                num_types = sum(count for _, count in counts)
                counted.append((Counted(counts, num_types, len(counts)), blend.recycled))
        for i, (index, known) in enumerate(zip(indexes, contexts, strict=True)):
            if order < len(known):
                counted.append((count_successors(index, known[order]), blend.source(i, order)))
        for (likeliest, num_types, num_successors), (concentration, discount) in counted:
            if num_successors == 0:
                continue
            total = num_types + concentration
            for token, types in likeliest:
                share = left * (types - discount) / total
                if share < blend.cut_share * cut:
                    break
                successors[token] = successors.get(token, 0.0) + share
            left = left * (concentration + discount * num_successors) / total
    return successors, left
