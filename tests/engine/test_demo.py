"""The demo as its users run it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.processes import run_python
from vllm_trie.lab.tiny_model import model_path

# Processes of their own: they set up their surroundings before vLLM is imported, and engines that
# end inside this process would take the process groups of the shared ones with them.


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    svg, rows, html = (tmp_path / name for name in ("tree.svg", "rows.json", "page.html"))
    done = run_python(
        "-m", "vllm_trie.cli", "demo", "--model", str(model_path()), "--max-tokens", "40",
        "--repeats", "1", "--batch-size", "4",
        "--svg", str(svg), "--json", str(rows), "--html", str(html),
        TTY_COMPATIBLE="1", TERM="dumb",
    )  # fmt: skip
    assert "outputs identical: yes\nngram_trie: " in done.stdout
    assert "Loading safetensors" not in done.stdout  # nothing of vLLM's reaches a terminal
    assert "the one that ships with the project" in done.stdout
    assert done.stderr == ""
    assert re.search(r"^\W*[└├]─ .* ✓$", done.stdout, re.MULTILINE)
    assert len(ET.parse(svg).getroot().findall(".//{*}rect")) > 3
    shown = re.search(r'id="data">(.*?)</script>', html.read_text(encoding="utf-8"))
    assert shown is not None
    plain, trees = json.loads(shown[1])["runs"]
    assert "".join(s["text"] for s in plain["steps"]) == "".join(s["text"] for s in trees["steps"])
    assert len(trees["steps"]) < len(plain["steps"])
    measured = json.loads(rows.read_text())
    methods = [row["method"] for row in measured]
    assert methods[:2] == ["plain", "ngram"]
    assert methods == methods[: len(methods) // 3] * 3
    total = measured[-1]
    assert total["identical"] is True
    trees = [row for row in measured if row["method"] == "ngram_trie"]
    assert total["tokens"] == sum(row["tokens"] for row in trees[:-1])
    assert 1.1 < total["tokens_per_step"] < 33
    assert 0 < total["nodes_per_step"] <= 32
