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
from vllm_trie.ngrams.blend import Blend, Kind, Source
from vllm_trie.ngrams.contexts import (
    Counted,
    Counts,
    Match,
    advance,
    count_listed,
    count_successors,
    match_suffix,
)
from vllm_trie.ngrams.index import NgramIndex, Place
from vllm_trie.ngrams.recycled import ANY_TOKEN
from vllm_trie.tree import ROOT


class Answer(NamedTuple):
    """The stored answer to such a prompt."""

    text: int
    """Its number in the store."""
    output_begin: int
    """Place of the output's first token in the tokens given; negative if it is before them."""


class Asked(NamedTuple):
    """A context that is asked."""

    counted: Counted
    discount: float
    share: float
    """The part of the probability left by longer contexts that its successors get."""
    left: float
    """That probability."""

    def part(self, count: int) -> float:
        """Return the part of the probability that a successor of this count gets."""
        num_types, num_successors = self.counted.num_types, self.counted.num_successors
        per_count = self.left * self.share / (num_types - self.discount * num_successors)
        return per_count * (count - self.discount)


Recycled = Callable[[int, int], list[Counts]]
"""Returns the successors of recycled contexts that end in two given tokens, the longer first."""


class Mixture:
    """The sources of one request, and how much of the probability each of their contexts gets.

    Args:
        indexes: Sources in the order in which they are believed; the first is the request's own
            text.
        kinds: Of each of them.
        blend: Parameters.
        recycled: None without recycled successors.
    """

    def __init__(
        self,
        indexes: Sequence[NgramIndex],
        kinds: Sequence[Kind],
        blend: Blend,
        recycled: Recycled | None = None,
    ) -> None:
        self.indexes = indexes
        self.kinds = kinds
        self.blend = blend
        self.recycled = recycled

    def ask(
        self,
        contexts: Sequence[list[Match]],
        last_two: tuple[int, int] | None,
        min_left: float,
        answer_order: int = -1,
    ) -> tuple[list[Asked], float]:
        """Ask the contexts at one point of the text, the longest first.

        Args:
            contexts: By source and length.
            last_two: Tokens before that point; None without recycled contexts.
            min_left: Shorter contexts are not asked if less probability is left.
            answer_order: Length of the context that is the stored answer so far.

        Returns:
            What was asked, and the probability that is left.
        """
        named: list[Counts] = []
        if self.recycled is not None and last_two is not None:
            named = self.recycled(*last_two)
        longest = max((len(matches) - 1 for matches in contexts), default=-1)
        if any(named):
            longest = max(longest, 0)
        asked: list[Asked] = []
        left = 1.0
        for order in range(longest, self.blend.min_order - 1, -1):
            if left < min_left:
                break
            counted: list[tuple[Counted, Source]] = []
            if order == 0:
                counted += [(count_listed(counts), self.blend.recycled) for counts in named]
            for index, kind, matches in zip(self.indexes, self.kinds, contexts, strict=True):
                if order < len(matches):
                    trust = self.blend.source(kind, order, order == answer_order)
                    counted.append((count_successors(index, matches[order]), trust))
            for successors, trust in counted:
                _, num_types, num_successors = successors
                if num_successors == 0:
                    continue
                claimed = num_types - trust.discount * num_successors
                share = claimed / (num_types + trust.concentration)
                asked.append(Asked(successors, trust.discount, share, left))
                left *= 1.0 - share
        return asked, left


def grow(
    tree: BestFirstTree,
    mixture: Mixture,
    token_ids: Sequence[int],
    heads: Sequence[Sequence[tuple[int, float]]] = (),
    answer: Answer | None = None,
) -> list[list[Match]]:
    """Fill a tree with the likeliest continuations of `token_ids`.

    Args:
        tree: empty.
        mixture: The sources.
        token_ids: The text that is continued.
        heads: Each head's candidates and their probabilities, the likeliest first.
        answer: Of the store, which is the second source then.

    Returns:
        The contexts at the end of the text, by source and length.
    """
    indexes, blend = mixture.indexes, mixture.blend
    # By number of the chosen guess at whose end they stand.
    contexts = {ROOT: [match_suffix(index, token_ids) for index in indexes]}
    answer_order = -1
    if answer is not None:
        answer_order = match_answer(indexes[1], contexts[ROOT][1], token_ids, answer)

    def expand(above: float, parent: int, depth: int) -> None:
        cut = tree.bound() / above
        asked, left = mixture.ask(
            contexts[parent],
            _last_two(tree, token_ids, parent),
            max(blend.min_left, blend.cut_left * cut),
            -1 if answer_order < 0 else answer_order + depth - 1,
        )
        shares = _shares(asked, blend.cut_share * cut)
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
                advance(index, matches, guess.token)
                for index, matches in zip(indexes, contexts[guess.parent], strict=True)
            ]
            expand(guess.probability, number, guess.depth + 1)
    return contexts[ROOT]


def _last_two(tree: BestFirstTree, token_ids: Sequence[int], parent: int) -> tuple[int, int]:
    """Return the last two tokens of a guess's path."""
    path: list[int] = []
    while parent != ROOT and len(path) < 2:
        path.insert(0, tree.chosen[parent].token)
        parent = tree.chosen[parent].parent
    before, last = ([ANY_TOKEN] * 2 + list(token_ids[-2:]) + path)[-2:]
    return before, last


def _shares(asked: Sequence[Asked], smallest: float) -> dict[int, float]:
    """Return the probability of each successor, without shares below `smallest`."""
    shares: dict[int, float] = {}
    for context in asked:
        for token, count in context.counted.likeliest:
            share = context.part(count)
            if share < smallest:
                break
            shares[token] = shares.get(token, 0.0) + share
    return shares


def match_answer(
    store: NgramIndex, matches: list[Match], token_ids: Sequence[int], answer: Answer
) -> int:
    """Make the stored answer the longest context, while the output repeats it from its beginning.

    It stands where it would if it began in the prompt. Behind `max_order` tokens the other contexts
    are as good.

    Returns:
        Its length as a context, -1 if it is none.
    """
    if answer.output_begin < 0:
        return -1
    text = store.texts.get(answer.text, [])
    output = list(token_ids[answer.output_begin :])
    length = len(output)
    if not 1 <= length < min(store.max_order, len(text)) or text[:length] != output:
        return -1
    matches[length + 1 :] = [Place(answer.text, length - 1)]
    return length + 1
