"""What is wrong with a command's arguments is said on stderr, with exit status 2."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from vllm_trie.cli import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo --method nope", "allowed"),
        ("demo --nodes 0", "greater than or equal to 1"),
        ("demo --batch-size many", "--batch-size"),
        ("demo --colour", "--colour"),
        ("demo --json missing/rows.json", "'missing' is no folder"),
        ("explore --method nope", "is no method; allowed, once each: plain, "),
        ("explore --method plain --method plain", "given twice"),
        ("explore --trace missing", "No such file"),
        ("explore --trace missing --method plain", "leave --prompt, --method and"),
        ("explore --beam-width -1", "--beam-width"),
        ("explore --output missing/page.html", "'missing' is no folder"),
        (f"items build {__file__} -o missing/items.trie", "'missing' is no folder"),
        (f"corpus build {__file__} -o missing/a --tokenizer none", "'missing' is no folder"),
        ("corpus synthesize none -o missing/a", "'missing' is no folder"),
        ("validate --model /no/such/folder --dtype float32", "/no/such/folder"),
        ("validate --dtype float64", "float64"),
        ("validate --part speeed", "speeed"),
        ("validate --json /no/such/folder/report.json", "cannot write"),
        ("validate --limit 0", "--limit"),
        ("validate --quik", "--quik"),
    ],
)
def test_wrong_usage(arguments, words):
    done = CliRunner().invoke(app, arguments.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in " ".join(re.sub(r"[│\n]", " ", done.stderr).split())
