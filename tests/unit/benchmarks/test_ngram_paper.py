"""The reproduction of the n-gram-trie paper."""

from __future__ import annotations

from ngram_paper import Settings, accept_lengths, row_of
from support.replay_data import Recording

# The answer copies the prompt from its beginning.
TEXT = list(range(10, 210))
COPY = Recording(1, "rag", TEXT, TEXT[:120])


def test_full_guesses_are_the_spike_of_the_histogram() -> None:
    row = row_of(Settings(), "rag", [COPY], 1000)
    # 12 tokens behind a match of one token, then n - L_p = 10 behind one of three, and one more.
    assert row["histogram"][12] == 1
    assert row["histogram"][10] == 9
    assert row["full_guesses"] == 9 / sum(row["histogram"])
    assert sum(length * count for length, count in enumerate(row["histogram"], 1)) == 119
    assert row["accept_length"] == 119 / sum(row["histogram"])


def test_settings_reach_the_drafter() -> None:
    short, _ = accept_lengths(Settings(ngram_size=5, max_prefix_len=2), [COPY], 1000)
    assert max(short) == 5  # behind the first token, whose match is one token long
    assert short[4] > 20
    few, _ = accept_lengths(Settings(nodes=2), [COPY], 1000)
    assert max(few) == 3
    new = Recording(2, "rag", [1, 2, 3], [4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7])
    assert set(accept_lengths(Settings(), [new], 1000)[0]) == {1}
    assert max(accept_lengths(Settings(index_output=True), [new], 1000)[0]) > 3
