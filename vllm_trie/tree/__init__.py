"""Token trees: data structure, node order and greedy verification, in NumPy and a compiled core."""

from vllm_trie.tree.batch import accept_all, accept_greedy, check_all, place, select_all
from vllm_trie.tree.layout import depth_first_layout, depth_first_order
from vllm_trie.tree.token_tree import ROOT, MalformedTreeError, TokenTree, words_per_node

__all__ = [
    "ROOT",
    "MalformedTreeError",
    "TokenTree",
    "accept_all",
    "accept_greedy",
    "check_all",
    "depth_first_layout",
    "depth_first_order",
    "place",
    "select_all",
    "words_per_node",
]
