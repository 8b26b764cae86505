"""Files, commands, flags and make targets that the pages name exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.docs.messages import VARYING, is_quoted_rightly
from tests.unit.docs.pages import ROOT, all_pages

PAGES = all_pages()
FOLDERS = (
    "vllm_trie", "tests", "docs", "examples", "benchmarks", "patches", "packaging", "requirements",
)  # fmt: skip
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("document", PAGES, ids=lambda p: p.name)
def test_files(document):
    missing = []
    for span in document.code_spans():
        is_path = re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]*", span)
        if is_path and not list(ROOT.glob(span.rstrip("/"))):
            missing.append(span)
        is_module = re.fullmatch(r"vllm_trie(\.\w+)+", span)
        if is_module and importlib.util.find_spec(span.rpartition(".")[0]) is None:
            missing.append(span)
    for command in document.commands():
        for script in re.findall(r"python ((?:benchmarks|examples)/[\w/]+\.py)", command):
            if not (ROOT / script).is_file():
                missing.append(script)
    assert missing == []


@pytest.mark.parametrize("document", PAGES, ids=lambda p: p.name)
def test_make_targets(document):
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for command in document.commands():
        for words in re.findall(r"(?:^|\s)make ([^#;&|`]*)", command.strip()):
            named = [w for w in words.split() if re.fullmatch(r"[a-z-]+", w)]
            if not command.strip().startswith(("make", "`", ".")) and " make " in command:
                named = named[:1]
            unknown = [name for name in named[:1] if name not in targets]
            assert not unknown, f"{document.name}: make {unknown}"


@pytest.mark.parametrize("document", PAGES, ids=lambda p: p.name)
def test_flags_of_benchmarks(document):
    for command in document.commands():
        for script, rest in re.findall(r"python (benchmarks/\w+\.py)([^|;&`]*)", command):
            source = _with_modules(ROOT / script)
            for flag in re.findall(r"(?<!\S)(--[a-z][\w-]*)", rest):
                parameter = flag.removeprefix("--").replace("-", "_")
                is_option = f'"{flag}"' in source or re.search(rf"^    {parameter}:", source, re.M)
                assert is_option, f"{document.name}: {script} {flag}"


def _with_modules(script: Path) -> str:
    """A benchmark's source and that of the benchmarks' modules it imports from."""
    source = script.read_text()
    modules = re.findall(r"^from support\.(\w+) import", source, re.M)
    return source + "".join(
        (script.parent / "support" / f"{name}.py").read_text() for name in modules
    )


@pytest.fixture(scope="module")
def cli():
    """Each command of `vllm-trie` and its options."""
    import typer

    from vllm_trie.cli import GROUPS, LAB_COMMANDS, app

    def options(command: Any) -> set[str]:
        return {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("-")
        } | {"--help"}

    root: Any = typer.main.get_command(app)
    options_of = {name: options(root.get_command(None, name)) for name in LAB_COMMANDS}
    for group, module in GROUPS.items():
        below: Any = typer.main.get_command(importlib.import_module(module).app)
        if not hasattr(below, "commands"):
            options_of[group] = options(below)
            continue
        options_of |= {
            f"{group} {name}": options(command) for name, command in below.commands.items()
        }
    return options_of


@pytest.mark.parametrize("document", PAGES, ids=lambda p: p.name)
def test_commands(document, cli):
    for line in document.commands():
        start = re.match(r"\s*(?:\$ )?(?:[\w./]*/)?vllm-trie(?= )(.*)", line)
        if start is None:
            continue
        if (
            is_quoted_rightly(line.strip())
            or " tokens per step" in line
            or VARYING in line.partition("#")[0]
        ):
            continue  # a message, not a command
        words = shlex.split(start[1].partition(" #")[0])
        if not words or words[0] in ("...", "--version"):
            continue
        name = " ".join(words[:2]) if " ".join(words[:2]) in cli else words[0]
        if words[1:] in ([], ["..."]) and any(command.startswith(f"{name} ") for command in cli):
            continue  # a group of commands
        assert name in cli, f"{document.name}: {line}"
        for word in words:
            if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
                assert word.partition("=")[0] in cli[name], f"{document.name}: {line}"


def test_the_table_of_families_is_that_of_the_tests():
    from tests.engine.families import FAMILIES

    text = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    tested = " ".join(line for line in rows if "| tree |" in line)
    words = set(tested.replace(",", " ").replace("|", " ").split())
    refused = " ".join(line for line in rows if "| refused |" in line or "| chain |" in line)
    for name, family in FAMILIES.items():
        if family.drafts == "tree":
            assert set(name.split()) - {"a", "without"} <= words, name
        elif not family.engine.keys() & {"kv_cache_dtype"}:  # no family
            assert name.split()[0].lower() in refused.lower(), name
