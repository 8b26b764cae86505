"""The demo without an engine: its arithmetic, its output, its exit status."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_trie.lab import local_engine, smollm2
from vllm_trie.lab.demo import command, measure
from vllm_trie.lab.demo.measure import ObservedStep, Row
from vllm_trie.lab.local_engine import RequestStep
from vllm_trie.tree import TokenTree

SECONDS = {"plain": 2.0, "ngram": 1.25, "suffix": 1.6, "ngram_trie": 1.0}
GOOD = Row("first", 100, SECONDS, 25, 750, True)
BAD = Row("second", 100, SECONDS, 25, 750, False)


def a_step(parents: list[int], path: tuple[int, ...], number: int = 3) -> ObservedStep:
    """A step whose output follows `path` in a tree with these parents, and a bonus token."""
    tokens = list(range(10, 10 + len(parents)))
    tree = TokenTree.from_lists(tokens, parents)
    new = (*(tokens[node] for node in path), 7)
    return ObservedStep("a [name]", number, (1, 2), RequestStep(0, new, tree))


class FakeEngines:
    """Engines whose runs take scripted times and give scripted outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outputs: dict[str, list[Any]]) -> None:
        self.runs: list[str] = []
        self.outputs = outputs
        self.clock = 0.0
        monkeypatch.setattr(measure, "generate", self.generate)
        monkeypatch.setattr(local_engine.time, "perf_counter", lambda: self.clock)

    def generate(self, llm: str, prompts: Any, params: Any) -> Any:
        self.runs.append(llm)
        output, seconds = self.outputs[llm].pop(0)
        self.clock += seconds
        return output


def test_comparison_takes_turns_and_medians(monkeypatch):
    same, other = [[1] * 20, [2] * 10], [[1] * 20, [3] * 10]
    engines = FakeEngines(
        monkeypatch,
        {
            "p": [(same, 3.0), (same, 1.0), (same, 2.0)],
            "n": [(other, 2.0), (same, 5.0), (same, 1.5)],
            "t": [(same, 1.0), (same, 9.0), (same, 0.5)],
        },
    )
    drafted = a_step([-1, 0], (0,))
    monkeypatch.setattr(
        measure, "observe", lambda llm, names, *rest: (engines.generate(llm, *rest), 10, [drafted])
    )
    names = {"plain": "p", "ngram": "n", "trees": "t"}
    row, answers, observed = measure.compare(names, ["a", "b"], [[1], [2]], None, 3)
    assert "".join(engines.runs) == "pnt" + "tnp" + "pnt"
    assert (answers, observed) == (same, [drafted])
    assert (row.name, row.seconds) == ("a, b", {"plain": 2.0, "ngram": 2.0, "trees": 1.0})
    assert (row.tokens_per_step, row.nodes_per_step) == (3.0, 0.2)
    assert (row.speed_up(), row.tokens_per_s("plain"), row.tokens_per_s("trees")) == (2, 15, 30)
    assert (row.method, row.best_peer) == ("trees", "ngram")
    assert row.identical is True, "vLLM's own methods are not judged"
    engines.outputs = {"p": [(same, 1.0)], "t": [(other, 1.0)]}
    pair = {"plain": "p", "trees": "t"}
    row = measure.compare(pair, ["a"], [[1]], None, 1)[0]
    assert (row.identical, row.best_peer) == (False, None)


def test_the_last_row_adds_up():
    first = Row("a, b", 30, {"plain": 2.0, "trees": 1.0}, 10, 150, True)
    second = Row("c", 10, {"plain": 4.0, "trees": 2.0}, 10, 0, False)
    row = measure.total([first, second])
    assert (row.tokens, row.seconds) == (40, {"plain": 6.0, "trees": 3.0})
    assert (row.tokens_per_step, row.nodes_per_step) == (2.0, 7.5)
    assert row.identical is False


@pytest.fixture
def pretended_run(monkeypatch):
    """Let the command run without engines and return the rows it is given."""

    def pretend(rows: list[Row]) -> None:
        step = a_step([-1, 0, 1], (0, 1))
        result = rows, {"first": "An answer."}, step, lambda tokens: str(list(tokens))
        monkeypatch.setattr(command, "_measure", lambda *args: result)
        monkeypatch.setattr(local_engine, "set_environment", lambda *args: None)

    return pretend


def run(*arguments: str) -> int:
    """Run the command; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        command.app(arguments)
    return int(ended.value.code or 0)


def test_identical_outputs_succeed_and_rows_are_written(pretended_run, tmp_path, capfd):
    rows = tmp_path / "rows.json"
    for last, status, said in (
        (BAD, 1, "outputs identical: NO"),
        (replace(GOOD, nodes=0), 0, "drafted nothing"),
        (GOOD, 0, "outputs identical: yes"),
    ):
        pretended_run([last, last])
        assert run("--model", "any", "--json", str(rows)) == status
        assert said in capfd.readouterr().out
    plain, ngram, _, trees = json.loads(rows.read_text())[:4]
    assert (ngram["method"], ngram["tokens_per_s"], ngram["tokens_per_step"]) == ("ngram", 80, None)
    assert (plain["method"], plain["tokens_per_s"], plain["tokens_per_step"]) == ("plain", 50, 1)
    assert (trees["method"], trees["tokens_per_s"], trees["speed_up"]) == ("ngram_trie", 100, 2)


def test_the_shipped_model_takes_the_place_of_one_that_cannot_be_fetched(
    pretended_run, monkeypatch, capfd
):
    def fail() -> Path:
        raise smollm2.FetchError("no network")

    pretended_run([GOOD, GOOD])
    monkeypatch.setattr(command.smollm2, "fetch", fail)
    assert run() == 0
    assert "the one that ships with the project, 3.5 M parameters; no network" in (
        capfd.readouterr().out
    )
    assert run("--model", "smollm2") == 2
    assert "no network" in capfd.readouterr().err


def test_the_users_environment_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("A_NEW_ONE", "")
    monkeypatch.delenv("A_NEW_ONE")
    local_engine.set_environment(True, {"OMP_NUM_THREADS": "1", "A_NEW_ONE": "x"})
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["A_NEW_ONE"] == "x"
    assert "VLLM_LOGGING_LEVEL" not in os.environ


def test_silence_reports_everything_when_something_fails(capfd):
    def fail() -> None:
        with local_engine.silence():
            os.write(1, b"the reason\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "the reason" in capfd.readouterr().err
