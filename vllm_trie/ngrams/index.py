"""The n-gram index in readable Python: the twin of core/index.cpp, and what runs without it.

A trie of all n-grams of up to `max_order + 1` tokens of some texts. An n-gram c·t, context c and
successor t, carries the two counts that Kneser-Ney smoothing needs: how often it occurred, and how
many distinct tokens came before it. The second answers "how likely is t in a new context", which is
what a shorter context is asked for when the longer ones do not know.

Source: Kneser and Ney, "Improved backing-off for m-gram language modeling" (1995).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MAX_ORDER = 8
"""Longest context that is looked up by default, in tokens."""
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
        """Where its last token is, while it occurred once. Its successor is then read from the
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

    def add_types(self, change: int) -> None:
        """One more type (1) or one less (-1)."""
        assert self.parent is not None
        self.types += change
        self.parent.child_types += change


class NgramIndex:
    """An index of texts. Adding and removing texts in any order leaves the counts of those that
    are in it."""

    def __init__(self, max_order: int) -> None:
        self.max_order = max_order
        self.root = Node(None, -1, None)
        self.texts: dict[int, list[int]] = {}
        self.num_tokens = 0
        self._free_texts: list[int] = []
        self._current = -1
        self._open: list[Node] = []  # known contexts that end at the text's end, longest first

    @property
    def num_nodes(self) -> int:
        return 1 + sum(1 for _ in self._below(self.root))

    @property
    def num_bytes(self) -> int:
        """A rough figure; Python objects take about ten times what the compiled index does."""
        return 600 * self.num_nodes

    def add_text(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Add a text; negative tokens separate. Returns its number."""
        text = self.begin_text()
        self.append(token_ids)
        return text

    def synchronize(self, token_ids: list[int]) -> None:
        """Make these tokens the only text: append what is missing, or begin anew where they do not
        continue what is known."""
        known = self.texts.get(0, [])
        if not self.texts or known != token_ids[: len(known)]:
            self.__init__(self.max_order)  # type: ignore[misc]
            self.begin_text()
            known = []
        self.append(token_ids[len(known) :])

    def begin_text(self) -> int:
        """Begin a new text, to which `append` adds."""
        self._current = self._free_texts.pop() if self._free_texts else len(self.texts)
        self.texts[self._current] = []
        self._open = [self.root]
        return self._current

    def append(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens to the end of the text begun last; O(length of the longest repeat) each."""
        for token in token_ids:
            self._append(int(token))

    def _append(self, token: int) -> None:
        text = self.texts[self._current]
        text.append(token)
        if token < 0:
            self._open = [self.root]
            return
        self.num_tokens += 1
        place = Place(self._current, len(text) - 1)
        still_open = []
        # From the longest context down. The n-gram one token longer is new unless it was found.
        longer_is_new = True
        for order, context in zip(range(len(self._open) - 1, -1, -1), self._open, strict=True):
            child = context.children.get(token)
            if child is None:
                self._add_child(context, token, place)
                continue
            child.count += 1
            if self.is_new_type(longer_is_new, order):
                child.add_types(1)
                _move_up(child)
            longer_is_new = False
            if order < self.max_order:
                self._enter_successor(child)
                still_open.append(child)
            child.text = self._current
        self._open = [*still_open, self.root]

    def is_new_type(self, longer_is_new: bool, order: int) -> bool:
        """Whether a known n-gram of `order` + 1 tokens counts once more."""
        return longer_is_new or order == self.max_order

    def _enter_successor(self, node: Node) -> None:
        """The n-gram occurs again: from now on its successors are nodes."""
        if node.once is None:
            return
        place = Place(node.once.text, node.once.position + 1)
        node.once = None
        token = self.token_at(place)
        if token >= 0:
            self._add_child(node, token, place)

    def _add_child(self, parent: Node, token: int, once: Place) -> None:
        child = parent.children[token] = Node(parent, token, once)
        parent.child_types += 1
        if len(parent.hot) < MAX_SUCCESSORS:
            parent.hot.append(child)
        else:
            parent.cold.insert(0, child)
        _move_up(child)

    def token_at(self, place: Place) -> int:
        """The token there, negative at the end of a text."""
        text = self.texts[place.text]
        return text[place.position] if place.position < len(text) else -1

    def remove_text(self, text: int) -> None:
        """Take a text out again."""
        tokens = self.texts[text]
        width = self.max_order + 1
        # The nodes of all its n-grams, by start and length.
        found: dict[tuple[int, int], Node] = {}
        for start in range(len(tokens)):
            node = self.root
            for length in range(1, min(width, len(tokens) - start) + 1):
                child = node.children.get(tokens[start + length - 1])
                if child is None:
                    break
                found[start, length] = node = child
        # From the end of the text: an n-gram goes after all those that begin with it.
        for end in range(len(tokens) - 1, -1, -1):
            if tokens[end] < 0:
                continue
            self.num_tokens -= 1
            longest = 1
            while longest < width and end >= longest and tokens[end - longest] >= 0:
                longest += 1
            longer_vanished = True
            for length in range(longest, 0, -1):
                gram = found.get((end - length + 1, length))
                if gram is None:
                    continue  # it occurred here alone, and vanishes with the text
                gram.count -= 1
                if longer_vanished or length == width:
                    gram.add_types(-1)
                    _move_down(gram)
                longer_vanished = gram.count == 0
                if longer_vanished:
                    _remove(gram)
        self.texts[text] = []
        self._free_texts.append(text)

    def _below(self, node: Node) -> Iterator[Node]:
        for child in node.children.values():
            yield child
            yield from self._below(child)


def _move_up(node: Node) -> None:
    """Put a child whose `types` grew where it belongs."""
    assert node.parent is not None
    hot, cold = node.parent.hot, node.parent.cold
    if node not in hot:
        if hot[-1].types > node.types:
            return
        cold.remove(node)
        cold.insert(0, hot.pop())
        hot.append(node)
    at = hot.index(node)
    while at > 0 and hot[at - 1].types <= node.types:
        hot[at - 1], hot[at] = hot[at], hot[at - 1]
        at -= 1


def _move_down(node: Node) -> None:
    """Put a child whose `types` shrank where it belongs among those that are kept in order."""
    assert node.parent is not None
    hot = node.parent.hot
    if node not in hot:
        return
    at = hot.index(node)
    while at + 1 < len(hot) and hot[at + 1].types > node.types:
        hot[at + 1], hot[at] = hot[at], hot[at + 1]
        at += 1


def _remove(node: Node) -> None:
    assert node.parent is not None
    parent = node.parent
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
        _move_up(next_hot)
