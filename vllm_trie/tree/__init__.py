"""Token trees: data structure, node order, greedy verification, drawing. NumPy only."""

from __future__ import annotations

from vllm_trie.tree.draw import draw_svg, draw_text, visible_text
from vllm_trie.tree.layout import depth_first_layout, depth_first_order, is_prefix
from vllm_trie.tree.token_tree import ROOT, MalformedTreeError, TokenTree
from vllm_trie.tree.verify import accept_greedy, accept_greedy_reference

__all__ = [
    "ROOT",
    "MalformedTreeError",
    "TokenTree",
    "accept_greedy",
    "accept_greedy_reference",
    "depth_first_layout",
    "depth_first_order",
    "draw_svg",
    "draw_text",
    "is_prefix",
    "visible_text",
]
