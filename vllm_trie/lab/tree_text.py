"""Token trees as text."""

from __future__ import annotations

from collections.abc import Callable, Collection

from vllm_trie.tree.token_tree import TokenTree

_VISIBLE = {" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible_text(text: str) -> str:
    """Return `text` with white space and control characters made visible, never empty."""
    shown = (
        _VISIBLE.get(char) or (char if char.isprintable() else f"\\u{{{ord(char):x}}}")
        for char in text
    )
    return "".join(shown) or "∅"


def draw_text(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int] = ()
) -> str:
    """Draw the tree as lines of text, one node a line in depth-first order.

    Siblings appear in index order; `accepted` are indices of nodes to mark with `✓`.
    """
    lines = ["●"]
    children = tree.children()
    stack = [(node, "", node == children[-1][-1]) for node in reversed(children[-1])]
    while stack:
        node, indent, is_last = stack.pop()
        mark = " ✓" if node in accepted else ""
        label = visible_text(token_text(tree.token_list[node]))
        lines.append(f"{indent}{'└─' if is_last else '├─'} {label}{_facts(tree, node)}{mark}")
        indent += "   " if is_last else "│  "
        below = children[node]
        stack.extend((child, indent, child == below[-1]) for child in reversed(below))
    return "\n".join(lines)


def _facts(tree: TokenTree, node: int) -> str:
    facts = []
    if tree.probabilities is not None:
        facts.append(_percent(tree.probabilities[node]))
    if tree.never_accept is not None and tree.never_accept[node]:
        facts.append("never accepted")
    return f"  ({', '.join(facts)})" if facts else ""


def _percent(probability: float) -> str:
    return f"{100 * float(probability):.2g}%" if probability < 0.1 else f"{100 * probability:.0f}%"
