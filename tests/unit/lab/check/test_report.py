"""The report, the table of parts, and the command around them."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_trie import cli
from vllm_trie.drafts import registry
from vllm_trie.lab import tiny_model
from vllm_trie.lab.check import command
from vllm_trie.lab.check.identity import PlainOutput, judge, unlikely
from vllm_trie.lab.check.parts import METHODS, Part, Settings, all_parts
from vllm_trie.lab.check.report import PartReport, Report, safe_options

runner = CliRunner()


def part(name: str, status: Any = "passed", **changes: Any) -> PartReport:
    return PartReport(**{"name": name, "status": status, "seconds": 1.0, "summary": "ok"} | changes)


def report(*parts: PartReport, **changes: Any) -> Report:
    start = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    given: dict[str, Any] = {"command": "c", "model": "m", "started": start, "finished": True}
    return Report(**given | {"parts": list(parts)} | changes)


# -- the report -----------------------------------------------------------------------------------


def test_markdown_of_a_run_that_failed():
    summary = "wrong | for\nall " + 500 * "x"
    log = ["INFO", "```", "RuntimeError: no"]
    text = report(part("a"), part("b", "failed", summary=summary, log=log), safe=["a"]).markdown()
    (row,) = [line for line in text.splitlines() if line.startswith("| b |")]
    assert "wrong \\| for all xxx" in row
    assert "\n- a" not in text
    assert text.endswith("``````text\nINFO\n```\nRuntimeError: no\n``````\n")


def test_only_a_finished_run_without_failures_passed():
    assert report(part("a"), part("b", "not applicable")).passed
    assert not report(part("a"), part("b", "failed")).passed
    assert not report(part("a"), finished=False).passed
    assert json.loads(report(part("a")).model_dump_json())["passed"] is True


def test_safe_options_name_what_passed():
    parts = all_parts(False, ["float32"])
    reports = [part(entry.name) for entry in parts]
    for report in reports:
        if report.name.startswith("medusa"):
            report.status = "not applicable"
    safe = safe_options(parts, reports, "cuda")
    assert any('"ngram_trie", "verification": "tree"' in line for line in safe)
    assert any("beam search" in line for line in safe)
    assert not any("medusa" in line for line in safe)
    assert safe_options(parts, reports, "cpu") == safe
    assert safe_options(parts, reports[:1] + reports[3:], "cuda") == []  # without the kernel


# -- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_the_table_of_parts(quick):
    parts = all_parts(quick, ["float32", "bfloat16"])
    names = [entry.name for entry in parts]
    assert len(set(names)) == len(names)
    assert set(METHODS) == set(registry._BUILT_IN)
    for index, entry in enumerate(parts):
        module, _, function = entry.work.partition(":")
        work = getattr(importlib.import_module(f"vllm_trie.lab.check.{module}"), function)
        assert list(inspect.signature(work).parameters)[1:] == list(entry.arguments)
        assert entry.needs is None or entry.needs in names[:index]


# -- the comparison -------------------------------------------------------------------------------


def plain(*tokens: int) -> PlainOutput:
    """The second likeliest token is the likeliest plus 100, less likely by its index over 20."""
    margins = [{token: 0.0, token + 100: index / 20} for index, token in enumerate(tokens)]
    return PlainOutput(prompt=[1], greedy=list(tokens), margins=margins, seeded=[])


@pytest.mark.parametrize(
    ("decoded", "allowed", "wrong", "ties"),
    [
        ([1, 2, 3, 4, 5], 0.0, 0, []),
        ([1, 102, 9, 9, 9], 0.15, 0, [0.05]),  # what follows is another text
        ([1, 102, 3, 4, 5], 0.0, 1, []),
        ([1, 2, 3, 4, 105], 0.15, 1, []),  # too unlikely
        ([1, 2, 9, 4, 5], 0.15, 1, []),  # not among the likeliest
        ([1, 2, 3], 0.15, 1, []),  # ended early
        ([1, 2, 3, 4, 5, 6], 0.15, 1, []),
    ],
)
def test_differences_are_wrong_or_near_ties(decoded, allowed, wrong, ties):
    problems, near = judge([plain(7, 8), plain(1, 2, 3, 4, 5)], [[7, 8], decoded], allowed)
    assert (len(problems), near) == (wrong, ties)
    assert all(problem.startswith("prompt 1: ") for problem in problems)


def test_unlikely_tokens_are_found(monkeypatch):
    """The token 7 is the likeliest everywhere."""
    below = {7: 0.0, 1: 3.0, 2: 20.0, 3: float("nan")}

    def generate(inputs: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        logprobs = {token: SimpleNamespace(logprob=-by) for token, by in below.items()}
        entries = [[None, *({7: logprobs[7], t: logprobs[t]} for t in p[1:])] for p in inputs]
        return [SimpleNamespace(prompt_logprobs=entry) for entry in entries]

    vllm = SimpleNamespace(SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    llm = SimpleNamespace(generate=generate)
    outputs = [[7, 1, 7], [7, 2], [3], []]
    assert unlikely(llm, [[1, 1]] * len(outputs), outputs) == [1, 2]


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def acted(monkeypatch):
    """Parts end as this says, by name; those that it does not name pass."""
    ends: dict[str, Any] = {}

    def run_parts(
        parts: list[Part], settings: Settings, *rest: Any, **options: Any
    ) -> Iterator[PartReport]:
        ends["heads"] = settings.heads
        for entry in parts:
            yield part(entry.name, ends.get(entry.name, "passed"))

    monkeypatch.setattr(command, "run_parts", run_parts)
    return ends


def test_exit_status_and_files(acted, tmp_path):
    path = tmp_path / "report.json"
    done = runner.invoke(cli.app, ["validate", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("# vllm-trie validate: passed")
    assert "ngram_trie, trees, float32: passed" in done.stderr
    assert Report.model_validate_json(path.read_text()).passed

    acted["attention kernel"] = "failed"
    done = runner.invoke(cli.app, ["validate", "--quick", "--json", str(path)])
    assert done.exit_code == 1
    assert "| attention kernel | **FAILED** |" in done.stdout
    assert Report.model_validate_json(path.read_text()).safe == []


def test_parts_can_be_chosen_and_bring_what_they_need(acted):
    done = runner.invoke(cli.app, ["validate", "--part", "ngram_trie, trees, bfloat16"])
    rows = [line.split(" | ")[0] for line in done.stdout.splitlines() if " | passed | " in line]
    assert rows == [
        "| versions and device",
        "| plain vLLM, bfloat16",
        "| ngram_trie, trees, bfloat16",
    ]


def test_heads_ship_for_models_that_ship_and_can_be_others(acted):
    shipped = str(tiny_model.medusa_path())
    for arguments, heads in (
        ([], shipped),
        (["--model", str(tiny_model.model_path())], shipped),
        (["--heads", "mine"], "mine"),
    ):
        runner.invoke(cli.app, ["validate", "--quick", *arguments])
        assert acted["heads"] == heads
