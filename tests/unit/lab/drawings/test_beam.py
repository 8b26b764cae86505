"""The drawing of a search."""

from __future__ import annotations

from typing import Any

from tests.unit.beam.models import random_model, run_search
from vllm_trie.lab.drawings.beam import draw_text
from vllm_trie.searches import SearchSettings


def token_text(token: int) -> str:
    return [" the", "<b>&", '"', "\n", "a"][token % 5]


def test_text_has_a_line_per_node():
    search = run_search(random_model(8), SearchSettings(3, 5, (0,), trace=True))
    search.hypotheses()
    trace: Any = search.trace
    lines = draw_text(trace, token_text).splitlines()
    assert len(lines) == 2 + len(trace.token_ids)
    body = "\n".join(lines[1:-1])
    assert body.count("✗") == trace.fates.count("dropped")
    assert body.count("■") == trace.fates.count("finished")
    for rank, score in enumerate(trace.scores, 1):
        assert f"#{rank} {score:.3f}" in body
    assert "␣the" in body
    assert "\\n" in body
    kept = draw_text(trace, token_text, dropped=False).splitlines()
    assert len(kept) == len(lines) - trace.fates.count("dropped")
