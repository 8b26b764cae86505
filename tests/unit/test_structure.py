"""The rules of docs/contributing.md for the package that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from tests.checkout import ROOT
from vllm_trie.hooks.ledger import table

FILES = [
    path.relative_to(ROOT)
    for path in (ROOT / "vllm_trie").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]
SOURCES = {path: ast.parse((ROOT / path).read_text()) for path in FILES if path.suffix == ".py"}
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
ENGINE = "vllm_trie.drafts.engine"


def floors(*names: str) -> dict[str, int]:
    """Return the floor of each folder or module; each string is a floor, the lowest first."""
    return {name: floor for floor, row in enumerate(names) for name in row.split()}


FLOORS = {
    "vllm_trie": floors(
        "refusal",
        "files native",
        "tree",
        "attention",
        "hooks",
        "drafts searches",
        "extras",
        "drafters",
        "lab",
        "cli",
    ),
    "vllm_trie.hooks": floors("ledger", "start wire", "frontend", "plugin"),
    "vllm_trie.drafts": floors(
        "text_store", "drafter", "registry", "ngrams budget", "archive", "ngram_trie", "engine"
    ),
    ENGINE: floors(
        "config draft_requests guard tree_step step_clock verification",
        "attention observers",
        "verifier",
        "start",
        "runners",
        "workers",
    ),
    "vllm_trie.searches.engine": floors(
        "constraint beam_support", "search_wire", "frontend scheduler worker"
    ),
    "vllm_trie.lab": floors(
        "cache tiny_model tree_text",
        "smollm2",
        "local_engine",
        "models",
        "explore corpus",
        "demo",
        "check",
        "commands",
    ),
}
"""A folder imports from lower floors only. Front end, scheduler and worker share one, as they run
in processes of their own: what passes between them is below."""

KNOWING_VLLM = re.compile(r"vllm_trie/(hooks|lab|extras|(drafts|searches)/engine)/")
"""The folders that import vLLM; the laboratory its public interface only."""


CORE = ("native", "files", "tree", "attention", "hooks", "drafts", "searches")

EXTRAS_WORDS = re.compile(
    r"prediction_tokens|[\"`.]predictions?\b|[Ff]orced.?[Tt]okens"
    r"|\bTRACE\b|trace_path|speculation_trace|Recorder"
    r"|store_path|[Rr]eplica|[Ww]arm_?[Ss]tart|[Cc]orp(us|ora)"
    r"|[Cc]atalogue|\bItem[A-Z]|ITEM|[\"`.]items[\"`]"
    r"|device_checks|gpu_check|search_check|kernel_check"
    r"|[Mm]edusa|lookahead_trie|Lookahead|Jacobi|trie_union|[Uu]nion(Drafter|Options)"
)
"""What extras are called by."""


def test_imports_form_no_circle():
    assert sum(map(len, IMPORTS.values())) > 500
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError


def imported(source: ast.Module) -> Iterator[str]:
    """Yield the package's modules that a module imports, in functions and for types too."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm_trie"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


IMPORTS = {name: {*imported(SOURCES[path])} - {name} for name, path in MODULES.items()}


def test_no_folder_imports_a_floor_above_it():
    upward = set()
    for name, targets in IMPORTS.items():
        for target in targets:
            for prefix, floors in FLOORS.items():
                places = [floor_of(module, prefix, floors) for module in (name, target)]
                if None not in places and places[0][0] != places[1][0]:
                    (_, floor), (_, other) = places
                    if floor <= other and short(target) != "extras":  # the table of them
                        upward.add((short(name), short(target)))
    assert upward == set()


def test_nothing_imports_the_laboratory():
    """The command line imports its commands by name, when they are asked for."""
    users = {name for name, targets in IMPORTS.items() if any(map(in_lab, targets))}
    assert {name for name in users if not in_lab(name)} == set()


def in_lab(module: str) -> bool:
    return f"{module}.".startswith("vllm_trie.lab.")


def floor_of(module: str, prefix: str, floors: dict[str, int]) -> tuple[str, int] | None:
    """Return a module's folder (or its own name) below a prefix, and the floor; None outside."""
    if not module.startswith(f"{prefix}."):
        return None
    place = module.removeprefix(f"{prefix}.").partition(".")[0]
    return (place, floors[place]) if place in floors else None


def short(module: str) -> str:
    return module.removeprefix("vllm_trie.")


def test_the_core_names_no_extra():
    named = [
        f"{path}: {match[0]}"
        for path in FILES
        if path.suffix in (".py", ".cpp", ".hpp") and path.parts[1] in CORE
        for match in EXTRAS_WORDS.finditer((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert named == []
    extras = {path.parts[2] for path in FILES if path.parts[1:2] == ("extras",)}
    assert {extra for extra in extras if not any(map(EXTRAS_WORDS.search, texts_of(extra)))} == {
        "__init__.py"
    }


def texts_of(extra: str) -> Iterator[str]:
    for path in SOURCES:
        if path.parts[:3] == ("vllm_trie", "extras", extra) and path.name != "__init__.py":
            yield (ROOT / path).read_text(encoding="utf-8")


DRAFTER = "drafts.ngram_trie.drafter"
SEARCH = "searches.engine."


@pytest.mark.parametrize(
    ("most", "starts"),
    [
        (36, ("drafts.engine.runners.v1", "drafts.engine.attention.cpu", DRAFTER)),
        (42, ("drafts.engine.runners.v2", "drafts.engine.runners.v2_trees", DRAFTER)),
        (
            38,
            (
                f"{SEARCH}frontend.requests",
                f"{SEARCH}scheduler.beam_scheduler",
                f"{SEARCH}worker.beams_v1",
                f"{SEARCH}frontend.hypotheses",
            ),
        ),
    ],
    ids=["draft on V1", "draft on V2", "search"],
)
def test_a_path_has_no_more_files(most, starts):
    """The modules that a step may run, without the ground and what the start alone runs."""
    pending, modules = [f"vllm_trie.{name}" for name in starts], set[str]()
    while pending:
        if (module := pending.pop()) not in modules:
            modules.add(module)
            pending += imported(without_types(SOURCES[MODULES[module]]))
    files = {short(name) for name in modules if MODULES[name].name != "__init__.py"}
    ground = ["native", "files", "tree", "attention", "refusal"]
    path = {
        name for name in files if name.partition(".")[0] not in ground and ".start." not in name
    }
    assert most // 2 < len(path) <= most, sorted(path)


def without_types(source: ast.Module) -> ast.Module:
    """Return a module without what it imports for types only."""
    is_for_types = ast.dump(ast.parse("TYPE_CHECKING", mode="eval").body)
    body = [n for n in source.body if ast.dump(getattr(n, "test", n)) != is_for_types]
    return ast.Module(body, [])


def test_no_gpu_process_imports_a_cpu_hook():
    """vLLM's CPU worker puts placeholders into ``torch.cuda`` when it is imported."""
    pending = [module for where in ("any", "cuda") for _, module in table.modules(where)]
    loaded: set[str] = set()
    while pending:
        module = pending.pop()
        if module not in loaded:
            loaded.add(module)
            pending += imported_at_start(SOURCES[MODULES[module]], "vllm_trie")
    assert f"{ENGINE}.runners.v2" in loaded
    of_cpu = {
        (short(module), name)
        for module in loaded
        for name in imported_at_start(SOURCES[MODULES[module]], "vllm.")
        if ".cpu" in name
    }
    assert of_cpu == set()


def imported_at_start(source: ast.Module, prefix: str) -> Iterator[str]:
    """Yield the modules that are imported when a module is."""
    for node in source.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(prefix):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES or prefix == "vllm." else str(node.module)


@pytest.mark.parametrize(("title", "most"), [("Path of a draft", 20), ("Path of a beam", 16)])
def test_the_files_of_a_walk_import_one_another(title, most):
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    steps = [row.split("|") for row in re.findall(r"^\|.* \d+\. .*$", section, re.MULTILINE)]
    files = {name for *_, column, step, _ in steps for name in re.findall(r"`(\S+\.py)`", column)}
    files |= {name for *_, step, _ in steps for name in re.findall(r"`(\S+\.cpp)`", step)}
    assert most // 2 < len(files) <= most
    paths = {path.removeprefix("vllm_trie/") for path in re.findall(r"`([\w/]+/\w+\.py)`", section)}
    walk = {module_of(path) for path in paths if not path.startswith("extras/")}
    assert len(walk) > 15
    reached = {name: with_exports(IMPORTS[name]) for name in walk}
    alone = [
        name
        for name in walk
        if not reached[name] & walk and not any(name in reached[other] for other in walk)
    ]
    assert alone == []


def with_exports(modules: set[str]) -> set[str]:
    """Return modules with those that the folders among them offer names of."""
    folders = {name for name in modules if MODULES[name].name == "__init__.py"}
    return modules.union(*(IMPORTS[name] for name in folders))


def module_of(path: str) -> str:
    """Return the module of a path below the package, or the only one that ends so."""
    name = path.removesuffix(".py").replace("/", ".")
    (module,) = [full for full in MODULES if full in (f"vllm_trie.{name}", name)]
    return module


def test_the_layers_below_do_not_know_vllm():
    imports = [
        f"{path}: {name}"
        for path, source in SOURCES.items()
        if not KNOWING_VLLM.match(path.as_posix())
        for node in source.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        if str(name).partition(".")[0] == "vllm"
    ]
    assert imports == []


def test_every_logger_is_below_vllms():
    """vLLM sets up loggers of its name alone, and a user's configuration may switch off others."""
    names = {
        call
        for path in SOURCES
        for call in re.findall(r"logger = .*ogger\((.*)\)", (ROOT / path).read_text())
    }
    assert names == {'f"vllm.{__name__}"', '"vllm.vllm_trie"'}
