"""The shared frame of the benchmarks, and the drafter of the speculation benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import harness
from support.full_trees import FullTreesDrafter

from vllm_trie.drafters import DrafterContext, DraftRequest

VOCAB_SIZE = 500
CONTEXT = DrafterContext(VOCAB_SIZE, max_model_len=1000, max_num_seqs=4, num_nodes=64)


@given(
    num_nodes=st.integers(1, 100),
    max_depth=st.integers(3, 40),
    done=st.integers(0, 20),
    chain_only=st.booleans(),
)
def test_full_trees_are_full_and_hold_the_answer(
    num_nodes: int, max_depth: int, done: int, chain_only: bool
) -> None:
    drafter = FullTreesDrafter(FullTreesDrafter.Options(), CONTEXT)
    prompt, answer = [1, 2, 3], list(range(100, 130))
    drafter.answers[tuple(prompt)] = answer
    tokens = np.array(prompt + answer[:done], dtype=np.int32)
    request = DraftRequest("r", tokens, len(prompt), num_nodes, max_depth, chain_only)
    (tree,) = drafter.propose([request])
    tree.validate(VOCAB_SIZE, num_nodes)
    assert max(tree.depths()) <= max_depth
    if chain_only:
        assert tree.is_chain
    else:
        assert tree.num_nodes == num_nodes


def test_full_trees_make_kv_move() -> None:
    drafter = FullTreesDrafter(FullTreesDrafter.Options(), CONTEXT)
    prompt, answer = [1, 2, 3], list(range(100, 200))
    drafter.answers[tuple(prompt)] = answer
    accepted, moved = [], 0
    for done in range(60):
        tokens = np.array(prompt + answer[:done], dtype=np.int32)
        (tree,) = drafter.propose([DraftRequest("r", tokens, len(prompt), 32, 100)])
        children = {p: {} for p in range(-1, tree.num_nodes)}
        for node, parent in enumerate(tree.parents.tolist()):
            children[parent][int(tree.token_ids[node])] = node
        path, node = [], -1
        for token in answer[done:]:
            if token not in children[node]:
                break
            node = children[node][token]
            path.append(node)
        accepted.append(len(path))
        moved += path != list(range(len(path)))
    assert sum(accepted) / len(accepted) > 1
    assert moved > 10


def test_runs_take_turns() -> None:
    order: list[str] = []

    def run(name: str) -> str:
        order.append(name)
        return name.upper()

    timed = harness.interleave({"a": lambda: run("a"), "b": lambda: run("b")}, 3)
    assert "".join(order) == "abbaab"
    assert [result for _, result in timed["b"]] == ["B"] * 3
    assert harness.median_seconds([(3.0, None), (1.0, None), (2.0, None)]) == 2.0
    slower = [(3.0, None), (4.0, None), (20.0, None)]
    assert harness.median_ratio(slower, [(1.0, None), (2.0, None), (4.0, None)]) == 3.0


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"method": "plain", "ms": 0.12345, "hidden": 1}, {"method": "trees", "ms": None}]
    harness.finish(rows, tmp_path / "rows.json", ["method", "ms"])
    assert "0.123" in capsys.readouterr().out
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [{k: v for k, v in row.items() if k != "machine"} for row in written] == rows
