"""The rules of docs/contributing.md for the package that a program can check."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter

from tests.checkout import ROOT

LONGEST_FUNCTION, MOST_FILES = 60, 12
LONGER = ("vllm_trie/attention/triton_kernel.py",)
"""A GPU kernel with its launch."""
FILES = [
    path.relative_to(ROOT)
    for path in (ROOT / "vllm_trie").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]
SOURCES = {path: ast.parse((ROOT / path).read_text()) for path in FILES if path.suffix == ".py"}
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
KNOWING_VLLM = ("vllm_hooks", "check")
"""The folders that import vLLM; the second one its public interface only."""


def test_functions_are_short() -> None:
    functions = (
        (path, node)
        for path, source in SOURCES.items()
        for node in ast.walk(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = [
        f"{path}: {node.name}"
        for path, node in functions
        if node.end_lineno - node.lineno >= LONGEST_FUNCTION and path.as_posix() not in LONGER
    ]
    assert long == []


def test_folders_have_few_files() -> None:
    counts = Counter(path.parent.as_posix() for path in FILES)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_imports_form_no_circle() -> None:
    graph = {name: set(imported(SOURCES[path].body)) for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises CycleError


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the package's modules that are imported when a module is."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from imported(node.body)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm_trie"):
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                yield whole if whole in MODULES else str(node.module)


def test_the_layers_below_do_not_know_vllm() -> None:
    found = [
        f"{path}: {name}"
        for path, source in SOURCES.items()
        if path.parts[1] not in KNOWING_VLLM
        for node in source.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None), *(each.name for each in node.names))
        if str(name).partition(".")[0] == "vllm"
    ]
    assert found == []
