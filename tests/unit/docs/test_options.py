"""Every option is documented with its default, and every documented option exists."""

from __future__ import annotations

import ast
import json
import re

import pytest
from pydantic import BaseModel

from docs.tools.tables import OPTION_CLASSES, option_class
from tests.unit.docs.pages import ROOT, Table, all_pages, page
from vllm_trie.drafts import registry

OPTIONS_PAGE = page("docs/options.md")
REQUESTS_PAGE = page("docs/http_api.md")


def table_of(name: str) -> Table:
    """The table behind a `<!-- generated: NAME -->` mark."""
    mark = f"<!-- generated: {name} -->"
    (text,) = [source.text for source in (OPTIONS_PAGE, REQUESTS_PAGE) if mark in source.text]
    text = text.partition(mark)[2].partition("<!-- end")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    return Table(rows[0], [[cell.strip() for cell in row] for row in rows[2:]])


@pytest.mark.parametrize("name", OPTION_CLASSES)
def test_table_holds_every_field_with_its_default(name):
    fields = option_class(name).model_fields
    rows = {row[0].strip("`"): row for row in table_of(name).rows}
    assert list(rows) == list(fields)
    for option, field in fields.items():
        default, effect = rows[option][1], rows[option][3]
        if field.is_required():
            assert default == "required"
        elif field.default is None:
            assert default == "none"
        else:
            assert json.loads(default.strip("`")) == field.default
        assert len(effect) > 15, f"{option} has no description"


@pytest.mark.parametrize("name", OPTION_CLASSES)
def test_allowed_values_are_those_that_the_class_takes(name):
    options = option_class(name)
    for row in table_of(name).rows:
        option, allowed = row[0].strip("`"), row[2]
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
