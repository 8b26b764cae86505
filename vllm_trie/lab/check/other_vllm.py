"""The report of `vllm-trie doctor --vllm`: how the ledger fits a vLLM that is not installed.

The ledger is that of the installed vLLM, whose classes the hooks derive from. The other vLLM is not
imported: `vllm_files` reads its Python files.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

import vllm_trie
from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger.table import check_entry, load
from vllm_trie.lab.cache import cache_folder
from vllm_trie.lab.check.vllm_files import VllmFiles
from vllm_trie.refusal import RefusedError

_PACKAGE = Path(vllm_trie.__file__).parent
_FEATURES = {"drafts": "speculation", "searches": "beam"}
_PIP = ("pip", "download", "-qq", "--disable-pip-version-check", "--retries", "1", "--no-deps")


@dataclass(frozen=True, slots=True)
class OtherReport:
    """The report of the command; ``dataclasses.asdict`` of it is the JSON form.

    Attributes:
        vllm: As it was given.
        hooks: How the ledger's entries fit, and what the plugin imports.
    """

    vllm: str
    hooks: tuple[ledger.Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing has moved."""
        return not any(hook.status in ("missing", "changed") for hook in self.hooks)


def collect(given: str, say: Callable[[str], None] = lambda text: None) -> OtherReport:
    """Compare the ledger with a vLLM.

    Args:
        given: Its version, its wheel, or the folder that holds its folder `vllm`.
        say: Is told what takes time.

    Raises:
        RefusedError: There is no such vLLM, or none is installed here.
    """
    if importlib.util.find_spec("vllm") is None:
        raise RefusedError(
            "--vllm needs an installed vLLM, as the plugin's hooks derive from its classes; take "
            "an environment with one of " + ", ".join(ledger.SUPPORTED_VLLM_VERSIONS)
        )
    files = VllmFiles(_open(given, say))
    say("importing the plugin's hooks")
    entries = ledger.entries()
    say(f"reading vLLM {given}")
    unread = [failure for where in ("any", "cpu", "cuda") for failure in load(where)]
    return OtherReport(
        given,
        (
            *(check_entry(entry, files.parameters) for entry in entries),
            *_check_imports(files),
            *(replace(failure, status="not checked") for failure in unread),
        ),
    )


def _open(given: str, say: Callable[[str], None]) -> Path | zipfile.Path:
    """Return what holds the folder `vllm`."""
    path: Path | zipfile.Path = Path(given)
    if not path.exists():
        try:
            version = str(Version(given))
        except InvalidVersion:
            raise RefusedError(
                f"--vllm={given!r} is neither a version, such as 0.34.0, nor a wheel or folder "
                "that exists"
            ) from None
        path = download(version, say)
    if path.is_file():
        try:
            path = zipfile.Path(str(path))
        except zipfile.BadZipFile:
            raise RefusedError(f"--vllm={given!r} is not a wheel; name a .whl file") from None
    if not (path / "vllm/__init__.py").is_file():
        raise RefusedError(
            f"--vllm={given!r} holds no vllm/__init__.py; name a wheel of vLLM, or the folder that "
            "holds its folder vllm"
        )
    return path


def download(version: str, say: Callable[[str], None]) -> Path:
    """Return the wheel of a release, which stays in the cache folder for the next time.

    Raises:
        RefusedError: The package index does not have it, or cannot be reached.
    """
    folder = cache_folder() / "wheels"
    if (wheel := _downloaded(folder, version)) is None:
        say(f"downloading vLLM {version} to {folder}")
        folder.mkdir(exist_ok=True)
        # An interrupted download must not be taken for the wheel.
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            command = [*_PIP, "--only-binary", ":all:", "--dest", temporary, f"vllm=={version}"]
            done = subprocess.run(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode or (whole := _downloaded(Path(temporary), version)) is None:
                raise RefusedError(_why_not(version, done.stdout))
            wheel = whole.rename(folder / whole.name)
    return wheel


def _downloaded(folder: Path, version: str) -> Path | None:
    wheels = folder.glob("vllm-*.whl")
    return next((w for w in wheels if Version(w.name.split("-")[1]) == Version(version)), None)


def _why_not(version: str, output: str) -> str:
    """Return why pip has no wheel, from what it says."""
    offered = re.search(r"\(from versions: (.*)\)", output)
    if offered and offered[1] != "none":
        newest = ", ".join(offered[1].split(", ")[-3:])
        return (
            f"the package index has no vLLM {version!r} for this platform; its newest are {newest}"
        )
    said = [line for line in output.splitlines() if line.strip()] or ["no message"]
    return (
        f"vLLM {version!r} could not be downloaded ({said[-1].removeprefix('ERROR: ')}); check the "
        "network and pip's index, or name a wheel or a folder"
    )


def _check_imports(files: VllmFiles) -> Iterator[ledger.Finding]:
    """Compare what the plugin imports, but for types and in the laboratory."""

    def look(target: str, is_called: bool) -> tuple[str, ...]:
        files.check_import(target)
        return ()

    for target, path in sorted(dict(_imports()).items()):
        entry = ledger.Entry(target, "read", f"imported by {path.as_posix()}")
        folder = path.parts[0]
        yield replace(check_entry(entry, look), feature=_FEATURES.get(folder, folder))


def _imports() -> Iterator[tuple[str, Path]]:
    """Yield each symbol that the plugin imports from vLLM, and the file that does."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        place = path.relative_to(_PACKAGE)
        body = [] if place.parts[0] == "lab" else ast.parse(path.read_text(encoding="utf-8")).body
        for node in (node for statement in body for node in _parts_at_run_time(statement)):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}:{alias.name}" for alias in node.names]
            yield from ((target, place) for target in targets if re.match(r"vllm[.:]", target))


def _parts_at_run_time(statement: ast.stmt) -> Iterator[ast.AST]:
    is_for_types = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    return iter(()) if is_for_types else ast.walk(statement)
