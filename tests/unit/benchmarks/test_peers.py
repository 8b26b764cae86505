"""The parts of the benchmark of peers, without an engine."""

from __future__ import annotations

import json

import peers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import peers_engines, replay_model
from support.replay_data import Recording

VOCAB_SIZE = 1000
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=20)


@given(texts=st.lists(TOKENS, min_size=1, max_size=3), data=st.data())
def test_rows_on_the_recorded_path_predict_it_and_others_do_not(texts, data):
    rows = st.tuples(
        st.integers(0, len(texts) - 1), st.integers(0, 24), st.integers(0, VOCAB_SIZE - 1)
    )
    owners, positions, tokens = zip(
        *data.draw(st.lists(rows, min_size=1, max_size=10)), strict=True
    )
    before = replay_model.Recorded.texts
    try:
        replay_model.Recorded.play(texts)
        predicted = replay_model.next_tokens(
            replay_model.Recorded.texts, *map(torch.tensor, (owners, tokens, positions)), VOCAB_SIZE
        ).tolist()
    finally:
        replay_model.Recorded.texts = before
    for owner, token, position, after in zip(owners, tokens, positions, predicted, strict=True):
        recorded = texts[owner]
        last = len(recorded) - 1
        truth = recorded[min(position + 1, last)]
        assert 0 <= after < VOCAB_SIZE
        assert (after == truth) == (token == recorded[min(position, last)])


def recordings() -> list[Recording]:
    multi = [Recording(i, "multi-turn", [1], [turn]) for i in range(10) for turn in (0, 1)]
    return [*multi, *(Recording(100 + i, "qa", [1], [2]) for i in range(10))]


def test_questions_are_spread_and_their_turns_stay_together():
    chosen = peers.choose(recordings(), 4, None)
    assert [(r.question_id, r.output[0]) for r in chosen] == [
        (0, 0), (0, 1), (5, 0), (5, 1), (100, 2), (102, 2), (105, 2), (107, 2),
    ]  # fmt: skip
    assert {r.category for r in peers.choose(recordings(), 1, ["qa"])} == {"qa"}
    assert len(peers.choose(recordings(), 99, None)) == 30
    with pytest.raises(SystemExit, match="multi-turn, qa"):
        peers.choose(recordings(), 1, ["rag"])


def measured(output: list[int], seconds: float, first: float, steps: int) -> object:
    parts = dict.fromkeys(peers_engines.PARTS, 0.25)
    return peers_engines.Measured(output, seconds, first, steps, 8 * steps, parts)


def example_rows() -> list[dict]:
    questions = [
        peers_engines.Question("qa", [1], [5, 6, 7, 8, 9], 5),
        peers_engines.Question("rag", [1], [5, 6, 7], 3),
    ]
    measurements = {
        (0, "plain"): [measured([5, 6, 7, 8, 9], s, 1.0, 4) for s in (5.0, 4.0, 9.0)],
        (1, "plain"): [measured([5, 6, 7], 3.0, 1.0, 2)],
        (0, "ngram"): [measured([5, 6, 7, 8, 9], 4.0, 1.0, 3)],
        (1, "ngram"): [measured([5, 6, 7], 1.0, 0.5, 1)],
        (0, "ngram_trie"): [measured([5, 6, 7, 8, 9], 2.5, 1.0, 2)],
        (1, "ngram_trie"): [measured([5, 6, 1], 2.0, 1.0, 1)],
    }
    methods = ["plain", "ngram", "ngram_trie"]
    return peers.with_means(peers.summarize("replay", methods, questions, measurements))


def test_ratios_count_the_prefill_and_steps_do_not():
    rows = {(row["category"], row["method"]): row for row in example_rows()}
    ours = rows["qa", "ngram_trie"]
    assert ours["decode_ratio_to_plain"] == pytest.approx(4 / 1.5)
    expected = {"tokens_per_s": 2.0, "tokens_per_step": 2.0, "nodes_per_step": 8}
    expected |= {"ms_per_output_token": 375, "first_token_ms": 1000, "identical": True}
    # 5.0 is the median of plain's repeats.
    assert ours | expected | {"ratio_to_plain": 2.0} == ours
    assert rows["rag", "ngram_trie"]["identical"] is False


def test_free_answers_of_other_lengths_are_compared_by_time_per_token():
    questions = [peers_engines.Question("qa", [1], None, 5)] * 2
    measurements = {
        **{(i, "plain"): [measured([5, 6, 7, 8, 9], 5.0, 1.0, 4)] for i in (0, 1)},
        (0, "ngram"): [measured([5, 6, 7, 8, 9], 3.0, 1.0, 2)],
        (1, "ngram"): [measured([5, 6, 2], 2.0, 1.0, 1)],
    }
    rows = peers.summarize("chat", ["plain", "ngram"], questions, measurements)
    assert rows[1]["ratio_to_plain"] == pytest.approx((10 / 10) / (5 / 8))
    assert rows[1]["decode_ratio_to_plain"] == pytest.approx((8 / 8) / (3 / 6))
    assert (rows[1]["identical"], rows[1]["identical_share"]) == (False, 0.5)


def test_means_are_over_categories_and_the_best_peer_is_the_one_with_the_best_mean():
    rows = {(row["category"], row["method"]): row for row in example_rows()}
    assert rows["mean", "ngram_trie"]["ratio_to_plain"] == pytest.approx((2.0 + 1.5) / 2)
    assert rows["mean", "ngram"]["ratio_to_plain"] == pytest.approx((1.25 + 3.0) / 2)
    assert rows["mean", "ngram_trie"]["ratio_to_best_peer"] == pytest.approx(1.75 / 2.125)
    assert rows["rag", "ngram_trie"]["ratio_to_best_peer"] == 0.5
    assert rows["mean", "ngram"]["ratio_to_best_peer"] is None
    assert rows["mean", "ngram_trie"]["identical"] is False


def test_each_of_several_workloads_runs_in_a_process_of_its_own(monkeypatch):
    def run(command: list[str], check: bool) -> None:
        options = peers.parse(command[2:])
        options.json.write_text(json.dumps(options.workload))

    monkeypatch.setattr(peers.sys, "argv", ["peers.py", "--max-tokens", "8"])
    monkeypatch.setattr(peers.subprocess, "run", run)
    assert peers.run_apart(peers.parse()) == list(peers.WORKLOADS)


def test_a_missing_peer_is_named(monkeypatch, capsys):
    monkeypatch.setattr(peers_engines.importlib.util, "find_spec", lambda name: None)
    assert peers_engines.available(["plain", "suffix", "suffix_tree"]) == ["plain"]
    assert capsys.readouterr().out.count("arctic-inference is not installed") == 2
