"""Token trees: data structure, node order, greedy verification and drawing, with NumPy only."""

from vllm_trie.tree.batch import accept_all, check_all, place, select_all
from vllm_trie.tree.draw import draw_svg, draw_text, visible_text
from vllm_trie.tree.layout import depth_first_layout, depth_first_order, is_prefix
from vllm_trie.tree.token_tree import ROOT, MalformedTreeError, TokenTree, words_per_node
from vllm_trie.tree.verify import accept_greedy

__all__ = [
    "ROOT",
    "MalformedTreeError",
    "TokenTree",
    "accept_all",
    "accept_greedy",
    "check_all",
    "depth_first_layout",
    "depth_first_order",
    "draw_svg",
    "draw_text",
    "is_prefix",
    "place",
    "select_all",
    "visible_text",
    "words_per_node",
]
