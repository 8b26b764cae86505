"""Messages that the pages quote are those of the code."""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.messages import VARYING, is_quoted_rightly, templates
from tests.unit.docs.pages import page


def quoted() -> list[str]:
    document = page("docs/troubleshooting.md")
    blocks = [
        " ".join(part.split()) for block in document.indented() for part in block.split("\n\n")
    ]
    return [*blocks, *(span for span in document.code_spans() if VARYING in span and " " in span)]


@pytest.mark.parametrize("message", quoted())
def test_message_is_in_the_code(message):
    assert len(message.replace(VARYING, "")) > 12, "too short to be recognized"
    assert is_quoted_rightly(message), message


def test_invented_messages_are_found():
    assert not is_quoted_rightly("num_speculative_tokens=… is far too large for …")
    assert len(quoted()) > 20


def test_line_in_the_log():
    lines = [
        line for line in page("docs/deployment.md").indented() if line.startswith("vllm-trie ")
    ]
    assert len(lines) == 1
    patterns = [text for text in templates() if text.startswith(f"vllm-trie {VARYING}: {VARYING} ")]
    assert any(
        re.fullmatch(r"[\w.]+".join(map(re.escape, text.split(VARYING))), lines[0].strip())
        for text in patterns
    )
