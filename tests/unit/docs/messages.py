"""The messages that the package can write."""

from __future__ import annotations

import ast
import functools
import re

from tests.unit.docs.pages import ROOT

VARYING = "…"


def template(node: ast.AST) -> str | None:
    """The text of a string in the code; what is filled in becomes `…`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[srdfgx]", VARYING, node.value.replace("%%", "%"))
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else VARYING for part in node.values)
        return "".join(map(str, parts))
    return None


@functools.cache
def templates() -> frozenset[str]:
    """Every string of the package, without layout at its ends."""
    texts = set()
    for path in (ROOT / "vllm_trie").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = template(node)
            if text is not None and len(text) > 10:
                texts.add(text.strip(" \n-"))
    return frozenset(texts)


def is_quoted_rightly(message: str) -> bool:
    """Whether a string of the code reads so, where `…` in the message stands for anything."""
    pattern = re.compile(".*?".join(map(re.escape, message.split(VARYING))), re.DOTALL)
    return any(pattern.fullmatch(text) for text in templates())
