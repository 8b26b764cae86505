"""Every option is documented with its default, and every documented option exists."""

from __future__ import annotations

import ast
import re

import pytest
from pydantic import BaseModel

from docs.tools.tables import OPTION_CLASSES, allowed_text, option_class
from tests.unit.docs.pages import ROOT, all_pages, page
from vllm_trie.drafts import registry

OPTIONS_PAGE = page("docs/options.md")
REQUESTS_PAGE = page("docs/http_api.md")


@pytest.mark.parametrize("name", OPTION_CLASSES)
def test_every_option_is_described_in_a_table(name):
    """`test_generated.py` holds the tables to the classes."""
    mark = f"<!-- generated: {name} -->"
    assert (OPTIONS_PAGE.text + REQUESTS_PAGE.text).count(mark) == 1
    for option, field in option_class(name).model_fields.items():
        assert len(field.description or "") > 15, f"{option} has no description"


@pytest.mark.parametrize("name", OPTION_CLASSES)
def test_allowed_values_are_those_that_the_class_takes(name):
    options = option_class(name)
    for option, field in options.model_fields.items():
        allowed = allowed_text(field)
        bounds = re.search(r"(-?[\d.]+) to (\d+)", allowed)
        if bounds is None or "list" in allowed:
            continue
        kind = float if "number," in allowed else int
        low, high = (kind(float(bound)) for bound in bounds.groups())
        assert not complains(options, option, high)
        assert complains(options, option, high + 1)
        if "above" not in allowed:
            assert not complains(options, option, low)
            assert complains(options, option, low - 1)


def complains(options: type[BaseModel], option: str, value: object) -> bool:
    """Whether this one value is refused, whatever it means with the others' defaults."""
    try:
        options.model_validate({option: value, "beam_width": 1} if "Beam" in options.__name__
                               else {option: value})  # fmt: skip
    except ValueError as error:
        return any(problem["loc"][:1] == (option,) for problem in error.errors())
    return False


def test_every_method_has_a_table():
    shown = {option_class(name) for name in OPTION_CLASSES}
    for method in registry._BUILT_IN:
        assert registry.get_drafter_class(method).Options in shown, method
        assert f"`{method}`" in OPTIONS_PAGE.text


def test_node_budget():
    from vllm_trie.drafts.engine.start.translate import DEFAULT_NODES, MAX_NODES

    rows = [row for table in OPTIONS_PAGE.tables() for row in table.rows]
    row = next(row for row in rows if "`num_speculative_tokens`" in row[0])
    assert row[1] == f"`{DEFAULT_NODES}`"
    assert f"1 to {MAX_NODES}" in row[2]


def test_request_and_engine_keys():
    from vllm_trie.hooks.frontend.request_options import option_keys
    from vllm_trie.hooks.start import additional_config as config

    for key in (config.CONFIG_KEY, config.BEAM_SEARCH):
        assert f"`{key}`" in OPTIONS_PAGE.text or f'["{key}"]' in OPTIONS_PAGE.text
    for key in option_keys():
        assert f"`{key}`" in REQUESTS_PAGE.text


def test_environment_variables():
    in_code = set()
    for path in (ROOT / "vllm_trie").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                in_code |= set(re.findall(r"^VLLM_TRIE_[A-Z_]+$", node.value))
    assert {"VLLM_TRIE_CACHE_DIR", "VLLM_TRIE_BEAM"} <= in_code
    rows = [row[0].strip("`") for table in OPTIONS_PAGE.tables() for row in table.rows]
    assert {name for name in rows if name.startswith("VLLM_TRIE_")} == in_code
    for document in all_pages():
        named = set(re.findall(r"\bVLLM_TRIE_[A-Z_]+\b", document.text))
        assert named <= in_code, document.name
