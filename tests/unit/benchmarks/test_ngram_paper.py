"""The reproduction of the n-gram-trie paper."""

from ngram_paper import Settings, row_of, with_noise
from support.replay_data import Recording

# The answer copies the prompt from its beginning.
TEXT = list(range(10, 210))
COPY = Recording(1, "rag", TEXT, TEXT[:120])


def test_full_drafts_are_the_spike_of_the_histogram():
    row = row_of(Settings(), "rag", [COPY], 1000)
    # n - L_p = 10 tokens behind any match, and one more.
    assert row["histogram"][10] == 10
    assert row["full_drafts"] == 10 / sum(row["histogram"])
    assert row["accept_length"] == row["by_question"] == 119 / sum(row["histogram"])


def test_settings_reach_the_drafter():
    short = row_of(Settings(ngram_size=5, max_prefix_len=2), "rag", [COPY], 1000)
    assert short["histogram"][3] > 20
    assert len(short["histogram"]) == 4
    few = row_of(Settings(nodes=2), "rag", [COPY], 1000)
    assert few["histogram"][2] > 20
    assert few["truncated"] > 20
    assert few["cut_in_tie"] == few["truncated"]  # every path occurs once


def test_the_output_is_not_indexed_and_noise_is():
    new = Recording(2, "rag", [1, 2, 3], [4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7])
    assert row_of(Settings(), "rag", [new], 1000)["accept_length"] == 1
    assert with_noise([new, COPY], 2.0)[0].prompt == [*TEXT[:6], 1, 2, 3]
