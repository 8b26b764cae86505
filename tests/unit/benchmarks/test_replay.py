"""The replay benchmark follows its definition, and what all benchmarks measure their runs with."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import replay
from support import harness
from support.replay_data import QUESTIONS_VARIABLE

from vllm_trie.tree import TokenTree


class Scripted:
    """Drafts the chain 1, 2 at every step, and notes what it was asked."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.finished: list[int] = []

    def draft(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> TokenTree:
        self.seen.append(tokens.tolist())
        return TokenTree.from_paths([[1, 2]], max_nodes=2)

    def finish(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        self.finished = tokens.tolist()


def test_steps_follow_the_definition():
    method = Scripted()
    recording = replay.Recording(1, "qa", prompt=[7, 8], output=[9, 1, 2, 3, 1, 5, 6, 1, 0])
    steps = replay.replay(method, "a", recording)
    # 9 comes from the prefill; then 1 2 +3, then 1 +5, then nothing +6, then 1 +0 (EOS).
    assert [step.num_tokens for step in steps] == [3, 2, 1, 2]
    assert method.seen[0] == [7, 8, 9]
    assert method.seen[1] == [7, 8, 9, 1, 2, 3]
    assert method.finished == [7, 8, 9, 1, 2, 3, 1, 5, 6, 1, 0]
    # The last step is not counted beyond the end.
    [step] = replay.replay(method, "a", replay.Recording(1, "qa", prompt=[7], output=[9, 1]))
    assert (step.num_tokens, step.num_nodes) == (1, 2)


def test_categories_pool_their_questions_and_the_mean_does_not():
    step = replay.Step
    rows = replay.summarize(
        "m", 8, {"qa": [step(4, 8, 1.0), step(2, 6, 3.0)], "rag": [step(1, 0, 2.0)]}
    )
    by_category = {row["category"]: row for row in rows}
    assert by_category["qa"]["tokens_per_step"] == 3
    assert by_category["mean"]["tokens_per_step"] == 2
    assert by_category["mean"]["nodes_per_step"] == 3.5
    assert {row["nodes"] for row in rows} == {8}


def test_a_missing_file_is_named(monkeypatch):
    monkeypatch.delenv(QUESTIONS_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["replay.py"])
    with pytest.raises(SystemExit, match=f"--questions: .*, or set {QUESTIONS_VARIABLE}"):
        replay.main()


def test_runs_take_turns():
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) or name for name in "ab"}
    timed = harness.interleave(runs, 3)
    assert "".join(order) == "abbaab"
    assert [result for _, result in timed["b"]] == ["b"] * 3
    assert harness.median_seconds([(3.0, None), (1.0, None), (2.0, None)]) == 2.0
    slower = [(3.0, None), (4.0, None), (20.0, None)]
    assert harness.median_ratio(slower, [(1.0, None), (2.0, None), (4.0, None)]) == 3.0
