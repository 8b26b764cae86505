"""The command without an engine: traces of a server, and what is refused."""

from __future__ import annotations

import json
import re

from typer.testing import CliRunner

from vllm_trie.cli import app
from vllm_trie.extras.traces.trace_file import Header, Step, TraceWriter
from vllm_trie.lab.tiny_model import model_path
from vllm_trie.tree import TokenTree


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explore", *arguments])
    return done.exit_code, " ".join(re.sub(r"[│\n]", " ", done.output).split())


def test_a_servers_trace_becomes_a_page(tmp_path):
    trace, output = tmp_path / "a.trace.jsonl", tmp_path / "page.html"
    with trace.open("wb") as file:
        model = str(model_path())
        writer = TraceWriter(file, Header.of("a", "ngram_trie", model, model, [65, 66]))
        writer.add(Step.of(TokenTree.from_lists([70, 71], [-1, -1]), (1,), (71, 72), 0.01))
    status, said = run("--trace", str(trace), "-o", str(output))
    assert (status, said) == (0, f"wrote {output}".replace("\n", ""))
    data = re.search(r'id="data">(.*?)</script>', output.read_text(encoding="utf-8"))
    (shown,) = json.loads(data[1])["runs"]
    assert shown["method"] == "ngram_trie"
    assert shown["steps"][0]["accepted"] == [1]
    assert "no end" in shown["notice"]


def test_other_files_are_no_traces(tmp_path):
    wrong = tmp_path / "x"
    wrong.write_text('{"a": 1}\n')
    status, said = run("--trace", str(wrong))
    assert status == 2
    assert "line 1, is no line of a trace" in said
