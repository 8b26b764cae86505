"""A newcomer's first commands, from an empty home: README's."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clean_room import run_page, steps_of
from tests.processes import FORKED
from tests.unit.docs.pages import page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl, which the pages use"),
]


def test_the_commands_of_readme(tmp_path, smollm2_folder):
    # The real model is the one that the suite has made.
    variables = {"VLLM_TRIE_CACHE_DIR": str(Path(smollm2_folder).parent), "PYTHONPATH": str(FORKED)}
    # Without a home of its own, vLLM looks at the class of the model in another process, each time.
    variables["VLLM_CACHE_ROOT"] = str(Path.home() / ".cache" / "vllm")
    rows = tmp_path / "rows.json"
    variables["ARGS"] = f"--max-tokens 16 --repeats 1 --batch-size 4 --json {rows}"  # of make demo
    variables |= {"TTY_COMPATIBLE": "1", "TERM": "dumb"}
    outcomes = run_page("README.md", tmp_path, **variables)
    steps = steps_of(page("README.md"))
    assert len(outcomes) == sum(step.reason is None for step in steps)
    printed = {outcome.text: outcome.output for outcome in outcomes}
    check_demo(printed["make demo"], json.loads(rows.read_text()))
    answer, metrics = (text for command, text in printed.items() if command.startswith("curl"))
    assert '"finish_reason":' in answer
    assert "vllm:trie_draft_nodes_total{" in metrics
    [snippet] = (text for command, text in printed.items() if "snippet.py" in command)
    assert "def fibonacci(n):" in snippet


def check_demo(printed: str, measured: list[dict[str, Any]]) -> None:
    assert "outputs identical: yes\nngram_trie: " in printed
    assert "model: smollm2-135m-instruct" in printed
    assert "Loading safetensors" not in printed  # nothing of vLLM's reaches a terminal
    assert re.search(r"^\W*[└├]─ .* ✓$", printed, re.MULTILINE)
    methods = [row["method"] for row in measured]
    assert methods[:2] == ["plain", "ngram"]
    assert methods == methods[: len(methods) // 3] * 3
    total = measured[-1]
    assert total["identical"] is True
    trees = [row for row in measured if row["method"] == "ngram_trie"]
    assert total["tokens"] == sum(row["tokens"] for row in trees[:-1])
    assert 1.1 < total["tokens_per_step"] < 33
    assert 0 < total["nodes_per_step"] <= 32
