"""Blended back-off in readable Python: the twin of `ngrams/core/draft.cpp`.

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
from enum import IntEnum
from typing import NamedTuple

from tests.oracles.ngrams.best_first import BestFirstTree
from tests.oracles.ngrams.contexts import Counted, Match, advance, count_successors, match_suffix
from tests.oracles.ngrams.index import NgramIndex, Place
from vllm_trie.drafts.ngrams.blend import Blend, Source
from vllm_trie.tree import ROOT


class Kind(IntEnum):
    """The sources of contexts."""

    OWN = 0
    STORE = 1
    ARCHIVE = 2


class Answer(NamedTuple):
    """The stored answer to such a prompt."""

    text: int
    """Its number in the store."""
    output_begin: int
    """Place of the output's first token in the tokens given; negative if it is before them."""


Row = Sequence[tuple[int, float]]
"""Tokens that the model held likely, with their probabilities."""


class Recycled(NamedTuple):
    """What the model held likely in earlier steps, for one point of a text; see
    :class:`vllm_trie.drafts.ngrams.blend.Recycled`."""

    contexts: Sequence[Row] = ((), (), (), ())
    """After the last tokens, by their number."""
    siblings: Row = ()
    guesses: Row = ()


class Heads(NamedTuple):
    """Predictions of a request's heads; see :class:`vllm_trie.drafts.ngrams.job.Candidates`."""

    tokens: Sequence[Sequence[int]] = ()
    probabilities: Sequence[Sequence[float]] = ()
    transitions: Sequence[Sequence[Sequence[float]]] = ()

    def after(self, token: int, head: int) -> Row:
        """Return a head's candidates behind a token."""
        probabilities = self.probabilities[head]
        if self.transitions and head > 0 and token in self.tokens[head - 1]:
            probabilities = self.transitions[head - 1][self.tokens[head - 1].index(token)]
        return list(zip(self.tokens[head], probabilities, strict=True))


FindRecycled = Callable[[Sequence[int], bool], Recycled]
"""Takes the last four tokens before a point of the text, :data:`ANY_TOKEN` for those before its
first, and whether the last one is committed."""
ANY_TOKEN = -1
MOST_CLAIMED = 0.98
ASKED_BEFORE = 0, 1, 4, 4
"""Lengths of the contexts before which the row of a context of 1, 2 or 3 tokens is asked."""


class Mixture:
    """The sources of one request, and how much of the probability each of their contexts gets.

    Args:
        indexes: Sources in the order in which they are believed; the first is the request's own
            text.
        kinds: Of each of them.
        blend: Parameters.
        recycled: None without.
    """

    def __init__(
        self,
        indexes: Sequence[NgramIndex],
        kinds: Sequence[Kind],
        blend: Blend,
        recycled: FindRecycled | None = None,
    ) -> None:
        self.indexes = indexes
        self.kinds = kinds
        self.blend = blend
        self.recycled = recycled

    def ask(
        self,
        contexts: Sequence[list[Match]],
        recycled: Recycled,
        min_left: float,
        smallest: float,
        answer_order: int = -1,
    ) -> tuple[dict[int, float], float]:
        """Ask the contexts at one point of the text, the longest first.

        Args:
            contexts: By source and length.
            recycled: For that point.
            min_left: Shorter contexts are not asked if less probability is left.
            smallest: Smaller shares of a successor are left out.
            answer_order: Length of the context that is the stored answer so far.

        Returns:
            The probability of each successor, and what is left.
        """
        longest = max((len(matches) - 1 for matches in contexts), default=-1)
        if recycled.contexts[1]:
            longest = max(longest, ASKED_BEFORE[3])
        elif recycled.siblings or recycled.guesses:
            longest = max(longest, 0)
        shares: dict[int, float] = {}
        left = 1.0
        trust = self.blend.recycled
        of_length = 0.0, trust.single, trust.pair, trust.triple
        for order in range(longest, self.blend.min_order - 1, -1):
            if left < min_left:
                break
            for length in (3, 2, 1):
                if order == ASKED_BEFORE[length]:
                    row = recycled.contexts[length]
                    left = _ask_row(shares, row, of_length[length], smallest, left)
            if order == 0:
                left = _ask_row(shares, recycled.siblings, trust.sibling, smallest, left)
                left = _ask_row(shares, recycled.guesses, trust.guess, smallest, left)
            for index, kind, matches in zip(self.indexes, self.kinds, contexts, strict=True):
                if order < len(matches):
                    source = source_of(self.blend, kind, order, order == answer_order)
                    counted = count_successors(index, matches[order])
                    left = _ask_counted(shares, counted, source, smallest, left)
        return shares, left


def source_of(blend: Blend, kind: Kind, order: int, is_answer: bool) -> Source:
    """Return the trust in contexts of a length in a source."""
    if kind is Kind.OWN:
        return blend.own
    is_long = order >= blend.long_order
    if kind is Kind.STORE:
        return blend.shared_long if is_long or is_answer else blend.shared
    if is_long:
        return blend.archive_long
    concentration, discount = blend.archive
    return Source(concentration * max(order, 1), discount)


def _ask_counted(
    shares: dict[int, float], counted: Counted, source: Source, smallest: float, left: float
) -> float:
    """Add the successors' parts of what is left, and return what is left then."""
    likeliest, num_types, num_successors = counted
    if num_successors == 0:
        return left
    claimed = num_types - source.discount * num_successors
    unit = left / (num_types + source.concentration)
    for token, count in likeliest:
        part = unit * (count - source.discount)
        if part < smallest:
            break
        shares[token] = shares.get(token, 0.0) + part
    return left * (1.0 - claimed / (num_types + source.concentration))


def _ask_row(
    shares: dict[int, float], row: Row, trust: float, smallest: float, left: float
) -> float:
    """Add the tokens' parts of what is left, and return what is left then."""
    total = 0.0
    for _, probability in row:
        total += probability
    if total * trust > MOST_CLAIMED:
        trust = MOST_CLAIMED / total
    for token, probability in row:
        part = left * trust * probability
        if part > 0.0 and part >= smallest:
            shares[token] = shares.get(token, 0.0) + part
    return left * (1.0 - trust * total)


def grow(
    tree: BestFirstTree,
    mixture: Mixture,
    token_ids: Sequence[int],
    heads: Heads,
    answer: Answer | None = None,
) -> list[list[Match]]:
    """Fill a tree with the likeliest continuations of `token_ids`.

    Args:
        tree: empty.
        mixture: The sources.
        token_ids: The text that is continued.
        heads: Predictions, which need no text.
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
        recycled = Recycled()
        if mixture.recycled is not None:
            recycled = mixture.recycled(_last_four(tree, token_ids, parent), parent == ROOT)
        shares, left = mixture.ask(
            contexts[parent],
            recycled,
            max(blend.min_left, blend.cut_left * cut),
            blend.cut_share * cut,
            -1 if answer_order < 0 else answer_order + depth - 1,
        )
        if depth <= len(heads.tokens) and left >= blend.min_left_for_heads:
            last = ANY_TOKEN if parent == ROOT else tree.chosen[parent].token
            for token, probability in heads.after(last, depth - 1):
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


def _last_four(tree: BestFirstTree, token_ids: Sequence[int], parent: int) -> list[int]:
    """Return the last four tokens of a guess's path."""
    path: list[int] = []
    while parent != ROOT and len(path) < 4:
        path.insert(0, tree.chosen[parent].token)
        parent = tree.chosen[parent].parent
    return ([ANY_TOKEN] * 4 + list(token_ids[-4:]) + path)[-4:]


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
