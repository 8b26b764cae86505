"""The demo without an engine: its arithmetic, its output, its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import save_file

from vllm_trie import demo
from vllm_trie.demo import command, engines, measure, report
from vllm_trie.demo.measure import Counts, ObservedStep, Row, Timing
from vllm_trie.demo.prompts import demo_prompts
from vllm_trie.tree import TokenTree

GOOD = Row("first", 100, 2.0, 1.0, 4.0, 30.0, True)
BAD = Row("second", 100, 2.0, 1.0, 4.0, 30.0, False)


def rendered(*shown: Any) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for each in shown:
        console.print(each)
    return console.export_text()


def a_step(parents: list[int], accepted: tuple[int, ...], step: int = 3) -> ObservedStep:
    tokens = list(range(10, 10 + len(parents)))
    tree = TokenTree.from_lists(tokens, parents)
    new = (*(tokens[node] for node in accepted), 7)
    return ObservedStep(0, step, (1, 2), tree, accepted, new)


def test_importing_the_demo_imports_no_engine() -> None:
    code = (
        "import sys, vllm_trie.demo\n"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_prompts_are_distinct() -> None:
    prompts = demo_prompts()
    assert 6 <= len(prompts) <= 8
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert len({prompt.message for prompt in prompts}) == len(prompts)


@given(count=st.integers(0, 40), batch_size=st.integers(1, 12))
def test_batches_hold_every_prompt_once_in_order(count: int, batch_size: int) -> None:
    groups = measure.batches(range(count), batch_size)
    assert [index for group in groups for index in group] == list(range(count))
    assert all(len(group) == batch_size for group in groups[:-1])
    assert all(1 <= len(group) <= batch_size for group in groups)


def test_summary_takes_medians_and_adds_up() -> None:
    timings = [Timing([3.0, 1.0, 2.0], [1.0, 9.0, 0.5]), Timing([4.0], [2.0])]
    counts = [Counts(5, 20, 100), Counts(5, 10, 50), Counts(10, 10, 0)]
    first, second, total = measure.summarize(
        ["a", "b", "c"], timings, [True, False], [30, 10], counts, batch_size=2
    )
    assert (first.name, second.name) == ("a, b", "c")
    assert (first.plain_seconds, first.tree_seconds) == (2.0, 1.0)
    assert (first.tokens_per_step, first.nodes_per_step) == (3.0, 15.0)
    assert (first.speed_up, first.plain_tokens_per_s, first.tree_tokens_per_s) == (2.0, 15.0, 30.0)
    assert (total.tokens, total.plain_seconds, total.tree_seconds) == (40, 6.0, 3.0)
    assert (total.tokens_per_step, total.nodes_per_step) == (2.0, 7.5)
    assert [row.identical for row in (first, second, total)] == [True, False, False]


def test_drawn_step_is_one_that_needed_the_tree() -> None:
    short = a_step([-1, -1, -1, -1], (3,))
    chain = a_step([-1, 0, 1, 2], (0, 1, 2, 3))
    leading = a_step([-1, 0, 1, 0, -1], (0, 1, 2))
    branched = a_step([-1, 0, -1, 2, 3], (2, 3, 4))
    assert measure.most_telling([]) is None
    assert measure.most_telling([short]) is short
    assert measure.most_telling([short, chain]) is chain
    assert measure.most_telling([chain, short, leading]) is leading
    assert measure.most_telling([chain, leading, branched, short]) is branched


def test_table_and_verdict_say_whether_outputs_are_identical() -> None:
    text = rendered(report.comparison_table([GOOD, GOOD], "ngram_trie"), report.verdict([GOOD]))
    assert "ngram_trie" in text
    assert "2.00×" in text
    assert "outputs identical: yes" in text
    assert "NO" not in text
    text = rendered(
        report.comparison_table([GOOD, BAD, BAD], "x"), report.verdict([GOOD, BAD, BAD])
    )
    assert "outputs identical: NO" in text
    assert "second" in text.partition("outputs identical: NO")[2]


def test_drawn_step_shows_the_tree_and_where_it_belongs() -> None:
    step = a_step([-1, 0, -1, 2, 3], (2, 3, 4))
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    report.show_step(console, step, "a [name]", lambda tokens: "".join(f"<{t}>" for t in tokens))
    text = console.export_text()
    assert "a [name]" in text
    assert "<1><2><12><13><14><7>" in text
    accepted = [line for line in text.splitlines() if line.endswith("✓")]
    assert [line.split()[-2] for line in accepted] == ["<12>", "<13>", "<14>"]


def test_notes_say_how_small_the_model_is() -> None:
    assert "3.4 M parameters" in report.notes(3_400_000, True, "m")
    assert "7.0 B parameters" in report.notes(7_000_000_000, False, "m")
    assert "parameters" not in report.notes(None, False, "m")


@pytest.fixture
def pretended_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the command run without engines and return the rows it is given."""

    def pretend(rows: list[Row]) -> None:
        result = rows, a_step([-1, 0, 1], (0, 1)), lambda tokens: str(list(tokens)), "a note"
        monkeypatch.setattr(command, "_run", lambda *args, **options: result)
        monkeypatch.setattr(engines, "set_environment", lambda verbose: None)

    return pretend


def test_identical_outputs_succeed_and_files_are_written(
    pretended_run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pretended_run([GOOD, GOOD])
    svg, rows = tmp_path / "tree.svg", tmp_path / "rows.json"
    assert demo.main(["--model", "any", "--svg", str(svg), "--json", str(rows)]) == 0
    assert "outputs identical: yes" in capfd.readouterr().out
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    plain, trees = json.loads(rows.read_text())[:2]
    assert (plain["method"], plain["tokens_per_s"], plain["tokens_per_step"]) == ("plain", 50, 1)
    assert (trees["method"], trees["tokens_per_s"], trees["speed_up"]) == ("ngram_trie", 100, 2)


def test_a_difference_fails(pretended_run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pretended_run([BAD, BAD])
    assert demo.main(["--model", "any"]) == 1
    assert "outputs identical: NO" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "nope"], "allowed"),
        (["--nodes", "0"], "greater than or equal to 1"),
        (["--batch-size", "many"], "--batch-size"),
        (["--colour"], "--colour"),
    ],
)
def test_wrong_options_are_explained(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(arguments) == 2
    assert said in capfd.readouterr().err


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("A_NEW_ONE", "")
    monkeypatch.delenv("A_NEW_ONE")
    engines.set_environment(True, {"OMP_NUM_THREADS": "1", "A_NEW_ONE": "x"})
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["A_NEW_ONE"] == "x"
    assert "VLLM_LOGGING_LEVEL" not in os.environ


def test_silence_holds_back_what_native_code_prints(capfd: pytest.CaptureFixture[str]) -> None:
    with engines.silence():
        os.write(1, b"noise\n")
        os.write(2, b"noise\n")
    with engines.silence(active=False):
        os.write(1, b"wanted\n")
    assert capfd.readouterr() == ("wanted\n", "")


def test_silence_tells_all_when_something_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with engines.silence():
            os.write(1, b"the reason\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "the reason" in capfd.readouterr().err


def test_parameters_are_counted_from_the_files(tmp_path: Path) -> None:
    assert engines.num_parameters(str(tmp_path)) is None
    weights = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}
    save_file(weights, tmp_path / "model.safetensors")
    assert engines.num_parameters(str(tmp_path)) == 17
