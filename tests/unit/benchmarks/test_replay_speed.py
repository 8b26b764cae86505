"""Recorded answers on a modelled clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import replay_speed
from support.replay_data import Recording

from vllm_trie.tree import TokenTree

COSTS = replay_speed.Costs(token=0.1, request=0.5, drafting=0.25, disturbance=0.3)


class Scripted(replay_speed.Method):
    """Drafts the chain 1, 2 for every request."""

    drafts = True

    def __init__(self) -> None:
        self.finished: list[replay_speed.Text] = []

    def draft(self, batch: Sequence[replay_speed.Text]) -> list[TokenTree]:
        return [TokenTree.from_paths([[1, 2]], max_nodes=2) for _ in batch]

    def finish(self, text: replay_speed.Text) -> None:
        self.finished.append(text)


def test_the_clock_follows_the_costs() -> None:
    recordings = [Recording(1, "qa", [7], [9, 1, 2, 3]), Recording(2, "rag", [8], [9, 5, 5])]
    method = Scripted()
    totals = replay_speed.decode(method, recordings, 2, 256, COSTS)
    # Together: 1 2 +3 and +5 with four nodes; then +5 alone with two.
    together, alone = 1.0 + 0.5 + 0.4 + 0.25, 1.0 + 0.2 + 0.25
    assert totals["qa"].seconds == pytest.approx(together / 2)
    assert totals["rag"].seconds == pytest.approx(together / 2 + alone)
    assert (totals["qa"].tokens, totals["rag"].tokens) == (3, 2)
    assert (totals["rag"].steps, totals["rag"].nodes) == (2, 4)
    assert [text.token_ids.tolist() for text in method.finished] == [[7, 9, 1, 2, 3], [8, 9, 5, 5]]
    plain = replay_speed.decode(replay_speed.Method(), recordings, 1, 256, COSTS)
    assert plain["qa"].seconds == 3.0
    rows = replay_speed.rows_of("scripted", 2, totals, plain)
    speeds = {row["category"]: row["speed"] for row in rows}
    assert speeds["qa"] == pytest.approx(3 / (together / 2))
    assert speeds["all"] == pytest.approx(5 / (together + alone))


def test_the_budget_drafts_where_drafts_are_cheap() -> None:
    phrase = list(range(20, 40))
    recordings = [Recording(i, "qa", phrase * 3, phrase * 3) for i in range(4)]
    nodes = {}
    for token in (0.001, 10.0):
        costs = replay_speed.Costs(token, 0.0, 0.001, 0.0)
        for name in ("ngram_trie", "ngram_trie_chain"):
            method = replay_speed.METHODS[name](64, costs)
            nodes[name, token] = replay_speed.decode(method, recordings, 2, 256, costs)["qa"].nodes
    assert min(nodes[name, 0.001] for name in ("ngram_trie", "ngram_trie_chain")) > 100
    assert max(nodes[name, 10.0] for name in ("ngram_trie", "ngram_trie_chain")) == 0
