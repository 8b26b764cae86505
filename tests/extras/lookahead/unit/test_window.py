from __future__ import annotations

import pytest

from vllm_trie.extras.lookahead.options import window_nodes
from vllm_trie.extras.lookahead.window import Window


@pytest.mark.parametrize(("window_size", "ngram_size"), [(1, 3), (1, 5), (10, 5), (7, 4)])
def test_sizes(window_size, ngram_size):
    window = Window(range(Window.start_size(window_size, ngram_size)), ngram_size)
    depth = window.depth
    while not window.is_filled:
        assert window.num_nodes <= window_nodes(window_size, ngram_size)
        width = window.highest_level.stop - window.highest_level.start
        assert window.advance(0, list(range(width))) == []
        assert window.depth == depth
    assert window.num_nodes == window_size * (ngram_size - 1) - 1
    assert len(window.advance(0, list(range(window_size)))) == window_size
    assert window.num_nodes == window_size * (ngram_size - 1) - 1
