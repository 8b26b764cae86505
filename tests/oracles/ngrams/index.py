"""The n-gram index in readable Python: the twin of `ngrams/core/index.cpp`.

A trie of all n-grams of up to `max_order + 1` tokens of some texts. An n-gram c·t, context c and
successor t, carries the two counts that Kneser-Ney smoothing needs: its occurrences, and the number
of distinct tokens before it. The second answers "how likely is t in a new context", the question to
a shorter context when the longer ones do not know.

Source: Kneser and Ney, "Improved backing-off for m-gram language modeling" (1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_SUCCESSORS = 32
"""Successors of a context that are kept in order, and read by a draft."""


class Place(NamedTuple):
    """A token of a text."""

    text: int
    position: int


class Node:
    """An n-gram: the path of its parent and then `token`."""

    __slots__ = (
        "child_types",
        "children",
        "cold",
        "count",
        "hot",
        "once",
        "parent",
        "text",
        "token",
        "types",
    )

    def __init__(self, parent: Node | None, token: int, once: Place | None) -> None:
        self.parent = parent
        self.token = token
        self.count = 1
        """Occurrences."""
        self.types = 1
        """Distinct tokens before it; its occurrences if it is of the greatest length."""
        self.once = once
        """Place of its last token, while it occurred once. Its successor is then read from the
        text; it gets children when it occurs again."""
        self.text = -1 if once is None else once.text
        """The text in which it occurred last."""
        self.children: dict[int, Node] = {}
        self.hot: list[Node] = []
        """The children with most types, in order; of equals the one that grew last is first."""
        self.cold: list[Node] = []
        """The other children, in no order that matters."""
        self.child_types = 0
        """Sum of `types` over the children."""

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return 0 if self.parent is None else 1 + self.parent.length

    def one_more_type(self) -> None:
        """Count a token that had not come before, and move up among the siblings."""
        assert self.parent is not None
        self.types += 1
        self.parent.child_types += 1
        hot, cold = self.parent.hot, self.parent.cold
        if self not in hot:
            if hot[-1].types > self.types:
                return
            cold.remove(self)
            cold.insert(0, hot.pop())
            hot.append(self)
        self.put_in_order()

    def one_type_less(self) -> None:
        """Take back what `one_more_type` did; the siblings in `cold` stay there."""
        assert self.parent is not None
        self.types -= 1
        self.parent.child_types -= 1
        if self in self.parent.hot:
            self.put_in_order()

    def put_in_order(self) -> None:
        """Move to the place in the parent's `hot` that the types say, before its equals."""
        assert self.parent is not None
        hot = self.parent.hot
        hot.remove(self)
        hot.insert(sum(sibling.types > self.types for sibling in hot), self)


class _Text:
    """A text of an index, and what its next token needs."""

    __slots__ = ("context_size", "first", "open", "token_ids")

    def __init__(self, first: int, context: list[int], contexts: list[Node]) -> None:
        self.first = first
        """Place in the request's text of the first token kept."""
        self.token_ids = context
        self.context_size = len(context)
        """Leading tokens that belong to the text it continues."""
        self.open = contexts
        """Known contexts that end at the text's end, longest first."""


class NgramIndex:
    """An index of texts. Its counts are those of the texts in it, whatever was removed before."""

    def __init__(self, max_order: int) -> None:
        self.max_order = max_order
        self.root = Node(None, -1, None)
        self.num_tokens = 0
        self.num_nodes = 1
        self._texts: dict[int, _Text] = {}
        self._free_texts: list[int] = []

    @property
    def texts(self) -> dict[int, list[int]]:
        """The tokens of each text, by its number; empty where one was removed."""
        return {number: text.token_ids for number, text in self._texts.items()}

    def add_text(self, token_ids: Sequence[int] | np.ndarray, text: int | None = None) -> int:
        """Add a text (negative tokens separate), or append to one. Returns its number."""
        if text is None:
            text = self._begin_text(_Text(0, [], [self.root]))
        self._append_all(text, token_ids)
        return text

    def synchronize(self, text: int, first: int, token_ids: list[int]) -> None:
        """Give a text these tokens from the place `first` on: append what is new. Where they do not
        continue it, begin it anew with them."""
        if not self._texts:
            self._begin_text(_Text(first, [], [self.root]))
        begin = self._texts[text].first
        indexed = self._texts[text].token_ids[max(first - begin, 0) :]
        end = begin + len(self._texts[text].token_ids)
        if not begin <= first <= end or indexed != token_ids[: len(indexed)]:
            if text == 0:
                self.__init__(self.max_order)  # type: ignore[misc]
            else:
                self.remove_text(text)
            self._begin_text(_Text(first, [], [self.root]))
            indexed = []
        self._append_all(text, token_ids[len(indexed) :])

    def begin_branch(self, context: np.ndarray) -> int:
        """Begin a text that continues text 0, which ends with `context`.

        Its n-grams may begin there, and count from the next token on. Returns its number.

        Args:
            context: int32 [at most `max_order`].
        """
        tokens, contexts = context.tolist(), []
        for start in range(len(tokens)):
            node: Node | None = self.root
            for token in tokens[start:]:
                node = None if node is None or token < 0 else node.children.get(token)
                if node is not None:  # its successors come from several texts
                    self._enter_successor(node)
            if node is not None:
                contexts.append(node)
        contexts.append(self.root)
        first = len(self._texts[0].token_ids) - len(tokens)
        return self._begin_text(_Text(first, tokens, contexts))

    def _begin_text(self, text: _Text) -> int:
        number = self._free_texts.pop() if self._free_texts else len(self._texts)
        self._texts[number] = text
        return number

    def _append_all(self, text: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens to the end of a text; O(length of the longest repeat) each."""
        for token in token_ids:
            self._append(text, int(token))

    def _append(self, number: int, token: int) -> None:
        text = self._texts[number]
        text.token_ids.append(token)
        if token < 0:
            text.open = [self.root]
            return
        self.num_tokens += 1
        place = Place(number, len(text.token_ids) - 1)
        still_open = []
        # From the longest context down. The n-gram one token longer is new unless it was found.
        longer_is_new = True
        for order, context in zip(range(len(text.open) - 1, -1, -1), text.open, strict=True):
            child = context.children.get(token)
            if child is None:
                self._add_child(context, token, place)
                continue
            child.count += 1
            if longer_is_new or order == self.max_order:
                child.one_more_type()
            longer_is_new = False
            if order < self.max_order:
                self._enter_successor(child)
                still_open.append(child)
            child.text = number
        text.open = [*still_open, self.root]

    def _enter_successor(self, node: Node) -> None:
        """Make the successor of an n-gram that occurs again a node.

        Where its text ends with it, another text has met it first: the next token of the text will
        be its successor.
        """
        if node.once is None:
            return
        place = Place(node.once.text, node.once.position + 1)
        node.once = None
        token = self.token_at(place)
        text = self._texts[place.text]
        if token >= 0:
            self._add_child(node, token, place)
        elif place.position == len(text.token_ids):
            longer = sum(context.length > node.length for context in text.open)
            text.open.insert(longer, node)

    def _add_child(self, parent: Node, token: int, once: Place) -> None:
        child = parent.children[token] = Node(parent, token, once)
        self.num_nodes += 1
        if len(parent.hot) < MAX_SUCCESSORS:
            parent.hot.append(child)
        else:
            parent.cold.insert(0, child)
        child.types = 0
        child.one_more_type()

    def token_at(self, place: Place) -> int:
        """Return the token there, negative at the end of a text."""
        tokens = self._texts[place.text].token_ids
        return tokens[place.position] if place.position < len(tokens) else -1

    def remove_text(self, text: int, num_tokens: int | None = None) -> None:
        """Take a text out again, or its last tokens, to which none is added any more. No branch may
        continue it."""
        tokens = self._texts[text].token_ids
        size = 0 if num_tokens is None else max(len(tokens) - num_tokens, 0)
        width = self.max_order + 1
        # The nodes of all its n-grams, by start and length.
        grams: dict[tuple[int, int], Node] = {}
        for start in range(len(tokens)):
            node = self.root
            for length in range(1, min(width, len(tokens) - start) + 1):
                child = node.children.get(tokens[start + length - 1])
                if child is None:
                    break
                grams[start, length] = node = child
        # From the end of the text: an n-gram goes after all those that begin with it.
        for end in range(len(tokens) - 1, max(size, self._texts[text].context_size) - 1, -1):
            if tokens[end] < 0:
                continue
            self.num_tokens -= 1
            longest = 1
            while longest < width and end >= longest and tokens[end - longest] >= 0:
                longest += 1
            longer_vanished = True
            for length in range(longest, 0, -1):
                gram = grams.get((end - length + 1, length))
                if gram is None:
                    continue  # it occurred here alone, and vanishes with the text
                gram.count -= 1
                if longer_vanished or length == width:
                    gram.one_type_less()
                longer_vanished = gram.count == 0
                if longer_vanished:
                    self._remove(gram)
        del tokens[size:]
        if not tokens:
            self._texts[text] = _Text(0, [], [])
            self._free_texts.append(text)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        parent = node.parent
        self.num_nodes -= 1
        del parent.children[node.token]
        parent.child_types -= node.types
        if node not in parent.hot:
            parent.cold.remove(node)
            return
        parent.hot.remove(node)
        if parent.cold:
            # The first of the others takes its place.
            next_hot = parent.cold.pop(0)
            parent.hot.append(next_hot)
            next_hot.put_in_order()
