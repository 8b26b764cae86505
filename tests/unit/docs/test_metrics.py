"""Metrics: the page, the dashboard and the code name the same ones."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.unit.docs.pages import ROOT, all_pages, page

DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "vllm-trie.json").read_text())
SUFFIXES = ("_total", "_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def ours():
    """Name as `/metrics` has it -> labels."""
    from vllm_trie.drafts.engine.frontend import metrics
    from vllm_trie.searches.engine.frontend import metrics as of_searches

    labels = {}
    made = metrics._Metrics()
    beams = map(of_searches.beam_counter, of_searches.BEAM_COUNTERS)
    others = (made.draft_failures, made.waits, made.tokens_per_step)
    for metric in (*made.counters.values(), *others, *beams):
        (described,) = metric.describe()
        name = described.name + ("_total" if described.type == "counter" else "")
        labels[name] = metric._labelnames
    assert len(labels) > 5
    return labels


@pytest.fixture(scope="module")
def stock():
    """Names that vLLM registers, without the suffixes that Prometheus adds."""
    spec = importlib.util.find_spec("vllm")
    folder = Path(str(spec.origin)).parent / "v1"
    names: set[str] = set()
    for path in [*folder.glob("metrics/*.py"), *folder.glob("spec_decode/metrics.py")]:
        names |= set(re.findall(r"[\"'](vllm:\w+)[\"']", path.read_text(encoding="utf-8")))
    assert "vllm:generation_tokens" in names
    return names


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_page_lists_every_metric_with_its_type(ours):
    rows = {
        row[0].strip("`"): row
        for table in page("docs/deployment.md").tables()
        if table.header[0] == "metric"
        for row in table.rows
    }
    assert set(rows) == set(ours)
    for name, row in rows.items():
        assert row[1] == ("counter" if name.endswith("_total") else "gauge")


def test_no_page_names_a_metric_that_does_not_exist(ours):
    for document in all_pages():
        named = set(re.findall(r"vllm:trie_\w*[a-z]\b(?![*_])", document.text))
        assert named <= set(ours), document.name


def test_dashboard_names_metrics_that_exist(ours, stock):
    used = set(re.findall(r"vllm:\w+", " ".join(expressions())))
    for name in used - set(ours):
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        assert base in stock, name
    assert set(ours) <= used, "a metric of the plugin is in no panel"


def test_dashboard_groups_by_labels_that_exist(ours):
    for expression in expressions():
        labels = re.findall(r"by \(([\w, ]+)\)", expression)
        matched = re.findall(r"[{,] ?(\w+)=~", expression)
        named = {label.strip() for group in labels for label in group.split(",")} | set(matched)
        for name in set(re.findall(r"vllm:trie_\w+", expression)):
            assert named <= set(ours[name]), expression
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]
            variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}


def test_failure_reasons(ours):
    from vllm_trie.hooks.wire import FAILURE_REASONS

    text = page("docs/deployment.md").text
    assert all(f"`{reason}`" in text for reason in FAILURE_REASONS)
