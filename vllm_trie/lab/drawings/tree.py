"""Draw a trie as text: a token tree here, a search in `drawings.beam`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from vllm_trie.tree.token_tree import TokenTree

_VISIBLE = {" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible_text(text: str) -> str:
    """Return `text` with white space and control characters made visible, never empty."""
    shown = (
        _VISIBLE.get(char) or (char if char.isprintable() else f"\\u{{{ord(char):x}}}")
        for char in text
    )
    return "".join(shown) or "∅"


class Node(NamedTuple):
    """A node as it is drawn."""

    label: str
    """Visible text."""
    suffix: str
    """Behind the label."""


Children = Sequence[Sequence[int]]
"""The children of each node, which have larger indices; the last entry has those of the root."""


def draw_text(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int] = ()
) -> str:
    """Draw the tree as lines of text, one node a line in depth-first order.

    Siblings appear in index order; `accepted` are indices of nodes to mark with `✓`.
    """
    return "\n".join(["●", *outline(tree.children(), _nodes(tree, token_text, accepted))])


def _nodes(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int]
) -> dict[int, Node]:
    accepted, nodes = set(accepted), {}
    for node, token in enumerate(tree.token_list):
        facts = []
        if tree.probabilities is not None:
            facts.append(_percent(tree.probabilities[node]))
        if tree.never_accept is not None and tree.never_accept[node]:
            facts.append("never accepted")
        suffix = f"  ({', '.join(facts)})" if facts else ""
        nodes[node] = Node(
            visible_text(token_text(token)), f"{suffix}{' ✓' if node in accepted else ''}"
        )
    return nodes


def outline(children: Children, nodes: Mapping[int, Node]) -> list[str]:
    """Return a line for each node, depth first."""
    lines = []
    stack = [(node, "", node == children[-1][-1]) for node in reversed(children[-1])]
    while stack:
        node, indent, is_last = stack.pop()
        lines.append(f"{indent}{'└─' if is_last else '├─'} {nodes[node].label}{nodes[node].suffix}")
        indent += "   " if is_last else "│  "
        below = children[node]
        stack.extend((child, indent, child == below[-1]) for child in reversed(below))
    return lines


def _percent(probability: float) -> str:
    return f"{100 * float(probability):.2g}%" if probability < 0.1 else f"{100 * probability:.0f}%"
