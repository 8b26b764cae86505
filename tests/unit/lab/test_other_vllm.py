"""`vllm-trie doctor --vllm`: what moved in a vLLM that is read, not imported."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_trie import cli
from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger.table import check_entry
from vllm_trie.lab.check import other_vllm
from vllm_trie.lab.check.other_vllm import OtherReport
from vllm_trie.lab.check.vllm_files import VllmFiles

INSTALLED = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


def doctor(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["doctor", "--vllm", *map(str, arguments)])


# -- the same as the check of the vLLM that is imported --------------------------------------------


def compare() -> dict[str, Any]:
    """Compare what is read of this process's vLLM with what is imported."""
    files = VllmFiles(Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent)
    differences, unchecked = [], {}
    for patch in ledger.entries():
        imported, read = check_entry(patch), check_entry(patch, files.parameters)
        if read.status == "not checked":
            unchecked[patch.target] = read.detail
            continue
        if imported != read:
            differences.append([imported.target, imported.status, read.status, read.detail])
        if patch.parameters is not None:
            names = list(inspect.signature(ledger.resolve(patch.target)).parameters)
            drop = ("self", "cls")
            read_names = [name for name in files.parameters(patch.target) if name not in drop]
            if [name for name in names if name not in drop] != read_names:
                differences.append([patch.target, names, read_names])
    return {"differences": differences, "unchecked": unchecked, "entries": len(ledger.entries())}


def assert_the_same(comparison: dict[str, Any]) -> None:
    assert comparison["differences"] == []
    assert comparison["entries"] > 200
    assert len(comparison["unchecked"]) < 20, comparison["unchecked"]


def test_it_finds_what_the_check_finds() -> None:
    """And in the newer vLLM, on which test_release_check.py runs a process."""
    assert_the_same(compare())


# -- what a name stands for ------------------------------------------------------------------------

FILES = {
    "__init__.py": "",
    "base.py": """
from abc import ABC
class Base(ABC):
    def inherited(self, a, *, b=0): ...
    def overridden(self, a): ...
""",
    "package/__init__.py": "from . import inner\nfrom .inner import function as exported",
    "package/inner.py": "from ..base import *\ndef function(x, *rest, y, **more): ...",
    "module.py": """
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING
import torch
from vllm.base import Base as _Base
from vllm.package.inner import Base
if TYPE_CHECKING:
    from vllm.package import only_a_type
try:
    from fast import chosen
except ImportError:
    def chosen(x): ...
if torch.there:
    def sometimes(x): ...
class Sub(_Base):
    attribute = 3
    annotated: int
    def overridden(self, a, c): ...
    alias = overridden
    @functools.cache
    def cached(self, a): ...
    @strange
    def strange(self, a): ...
class Inner(Sub):
    def __init__(self, size): ...
class Outer(torch.nn.Module, Sub): ...
class Bare(Sub): ...
@dataclass
class Data:
    a: int
    b: int = 0
@dataclass
class More(Data):
    c: int = 0
def late(x): ...
def late(x, y): ...
def __getattr__(name): ...
""",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> VllmFiles:
    root = tmp_path_factory.mktemp("small")
    for name, text in FILES.items():
        (root / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "vllm" / name).write_text(text)
    return VllmFiles(root)


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("module:Sub.inherited", ["self", "a", "b"]),
        ("module:Sub.overridden", ["self", "a", "c"]),
        ("module:Sub.alias", ["self", "a", "c"]),
        ("module:Sub.cached", ["self", "a"]),
        ("module:Base.inherited", ["self", "a", "b"]),
        ("module:Inner", ["self", "size"]),
        ("module:Data", ["a", "b"]),
        ("module:More", ["a", "b", "c"]),
        ("module:late", ["x", "y"]),
        ("package:exported", ["x", "rest", "y", "more"]),
        ("package:inner.function", ["x", "rest", "y", "more"]),
        ("package.inner:Base.overridden", ["self", "a"]),
    ],
)
def test_parameters(small: VllmFiles, target: str, parameters: list[str]) -> None:
    assert small.parameters(f"vllm.{target}") == parameters


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("gone:x", ModuleNotFoundError),
        ("base:Gone", AttributeError),
        ("module:Sub.gone", AttributeError),
        ("package:only_a_type", AttributeError),
        ("module:only_a_type", NotImplementedError),  # its module makes attributes when asked
        ("module:chosen", NotImplementedError),
        ("module:sometimes", NotImplementedError),
        ("module:Sub.strange", NotImplementedError),
        ("module:Sub.annotated", NotImplementedError),
        ("module:Sub.attribute", NotImplementedError),  # whatever it is, it may be callable
        ("module:Sub.cached.cache_clear", NotImplementedError),
        ("module:Outer.inherited", NotImplementedError),  # torch's class comes first
        ("module:Outer", NotImplementedError),
        ("module:Bare", NotImplementedError),
    ],
)
def test_what_is_not_there_and_what_files_do_not_tell(
    small: VllmFiles, target: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        small.parameters(f"vllm.{target}")


# -- the command -----------------------------------------------------------------------------------

GONE = "v1/worker/gpu/async_utils.py"
EDITS = {
    "v1/core/kv_cache_utils.py": {"class KVCacheBlockCopy": "class Renamed"},
    "v1/core/kv_cache_manager.py": {
        "get_computed_blocks(self, request:": "get_computed_blocks(self, r:"
    },
    "v1/worker/gpu/spec_decode/__init__.py": {
        "device: torch.device,": "req_states,",
        'req_states: "RequestState",': "device,",
    },
    "v1/core/block_pool.py": {
        "def free_blocks": "def free",
        "def get_new_blocks": "def renamed",  # which is now of a base
        "class BlockPool:": "class Base:\n    def get_new_blocks(self, num_blocks): ...\n\n"
        "class BlockPool(Base):",
    },
}
"""By file, what an edit puts in the place of what."""


@pytest.fixture(scope="module")
def moved(tmp_path_factory: Any) -> Path:
    """A copy of vLLM's files in which a module, a class and a method are gone, a parameter is
    renamed, and two are swapped where vLLM's module takes the function from."""
    root: Path = tmp_path_factory.mktemp("moved")
    for path in INSTALLED.rglob("*.py"):
        target = root / "vllm" / path.relative_to(INSTALLED)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    (root / "vllm" / GONE).unlink()
    for name, edits in EDITS.items():
        text = (INSTALLED / name).read_text()
        for old, new in edits.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (root / "vllm" / name).unlink()
        (root / "vllm" / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def read(moved: Path) -> OtherReport:
    return other_vllm.collect(str(moved))


@pytest.fixture
def report(read: OtherReport, monkeypatch: pytest.MonkeyPatch) -> OtherReport:
    """The report on it, which the command then prints."""
    monkeypatch.setattr(other_vllm, "collect", lambda *_, **__: read)
    return read


def test_what_moved_is_reported_and_nothing_else(report: OtherReport) -> None:
    moved = {
        hook.target.removeprefix("vllm.v1."): hook.status
        for hook in report.hooks
        if hook.status not in ("ok", "not checked")
    }
    lost = {name for name in moved if name.startswith("worker.gpu.async_utils:")}
    assert len(lost) >= 4
    assert {moved.pop(name) for name in lost} == {"missing"}
    assert moved == {
        "core.kv_cache_utils:KVCacheBlockCopy": "missing",
        "core.block_pool:BlockPool.free_blocks": "missing",
        "core.kv_cache_manager:KVCacheManager.get_computed_blocks": "changed",
        "worker.gpu.model_runner:init_speculator": "changed",
    }
    result = doctor(report.vllm)
    assert result.exit_code == 1
    *lines, speculation, last = [
        line for line in result.stdout.splitlines() if not re.match(r"(beam|hooks|extras): ", line)
    ]
    assert {line.partition(":")[0] for line in lines} == {"missing", "changed"}
    [changed] = [line for line in lines if "KVCacheManager.get_computed_blocks" in line]
    assert "expected parameters ('request',), found ('r',)" in changed
    counts = r"speculation: \d+ of \d+ hooks fit, \d missing, 2 changed, \d not checked"
    assert re.fullmatch(counts, speculation)
    assert last == f"vLLM {report.vllm}: something has moved, by a reading of its files"
    shown = json.loads(doctor(report.vllm, "--json").stdout)
    assert (shown["healthy"], shown["vllm"]) == (False, report.vllm)
    assert len(shown["hooks"]) == len(report.hooks)


def test_what_is_not_checked_is_no_fault_and_is_named(
    report: OtherReport, monkeypatch: Any
) -> None:
    hooks = tuple(hook for hook in report.hooks if hook.status in ("ok", "not checked"))
    fine = OtherReport("0.99.0", hooks)
    monkeypatch.setattr(other_vllm, "collect", lambda *_, **__: fine)
    result = doctor("0.99.0", "--verbose")
    assert result.exit_code == 0
    assert result.stdout.endswith("vLLM 0.99.0: nothing has moved, by a reading of its files\n")
    assert "\nnot checked: vllm.v1.attention.selector:_cached_get_attn_backend" in result.stdout


# -- getting it ------------------------------------------------------------------------------------


def make_wheel(folder: Path, version: str) -> Path:
    """Write the smallest wheel of a vLLM that pip takes."""
    path = folder / f"vllm-{version}-py3-none-any.whl"
    info = f"vllm-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/v1/request.py", "class Request: ...")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which pip looks for wheels, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_a_release_is_fetched_once(index: Path, tmp_path: Path, monkeypatch: Any) -> None:
    wheel = make_wheel(index, "0.99.0")
    failure = ledger.Finding("a.hook", "imported", "missing", "why", "", "", "beam")
    monkeypatch.setattr(other_vllm, "load", lambda where: (failure,))
    for given in (wheel, "0.99", "0.99.0"):
        result = doctor(given, "--verbose")
        assert result.exit_code == 1
        assert "ok: vllm.v1.request:Request" in result.stdout
        assert "missing: vllm.v1.request:Request.update_block_hashes" in result.stdout
        assert "No module named 'vllm.v1.outputs'" in result.stdout
        assert "not checked: a.hook (imported): why" in result.stdout
        if given == "0.99":
            wheel.unlink()
    assert [path.name for path in (tmp_path / "cache" / "wheels").iterdir()] == [wheel.name]


def test_a_part_of_a_wheel_is_not_trusted(index: Path, tmp_path: Path, monkeypatch: Any) -> None:
    wheel = make_wheel(index, "0.99.0")

    def interrupt(command: list[str], **_: Any) -> None:
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes()[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(other_vllm.subprocess, "run", interrupt)
        patch.setattr(tempfile.TemporaryDirectory, "cleanup", lambda _: None)  # as if killed
        with pytest.raises(KeyboardInterrupt):
            other_vllm.download("0.99.0", lambda _: None)
    fetched = other_vllm.download("0.99.0", lambda _: None)
    assert fetched == tmp_path / "cache" / "wheels" / wheel.name
    assert fetched.read_bytes() == wheel.read_bytes()


def test_what_cannot_be_read_is_said(index: Path, tmp_path: Path) -> None:
    def error(given: object) -> str:
        result = doctor(given)
        assert (result.exit_code, result.stdout) == (1, "")
        return str(result.stderr)

    assert "vLLM '0.99.0' could not be downloaded (No matching" in error("0.99.0")
    make_wheel(index, "0.98.0")
    assert "has no vLLM '0.99.0' for this platform; its newest are 0.98.0" in error("0.99.0")
    assert "--vllm='newest' is neither a version" in error("newest")
    assert "gone.whl' is neither a version" in error(tmp_path / "gone.whl")
    (tmp_path / "text.whl").write_text("text")
    assert "text.whl' is not a wheel" in error(tmp_path / "text.whl")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert "other.whl' holds no vllm/__init__.py" in error(tmp_path / "other.whl")
    assert "holds no vllm/__init__.py" in error(tmp_path)
    result = doctor("0.98.0", "--quick")
    assert (result.exit_code, "drop one" in result.stderr) == (2, True)
