"""The package without some of its extras, in processes of its own.

python -m tests.deletion imports NAME ...
python -m tests.deletion run NAME ... -- MODULE ARGUMENT ...

Without arguments: imports without each extra, and imports, an engine and `TESTS` without all.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkout import ROOT

EXTRAS = Path("vllm_trie/extras")
TESTS = [
    f"tests/unit/{name}.py"
    for name in (
        "beam/test_settings",
        "drafters/test_ngram_index",
        "drafters/test_ngram_trie",
        "drafters/test_registry",
        "drafters/test_store",
        "hooks/test_config",
        "hooks/test_drafting",
        "hooks/test_hypotheses",
        "hooks/test_ledger",
        "hooks/test_request_options",
    )
]
"""Of modules that ask extras, or that objects of theirs pass through; those of others cannot know
them, see `tests/unit/test_structure.py`."""


def copy_without(names: set[str], folder: Path) -> None:
    """Link the checkout into a folder, without extras and their tests."""
    for where in (Path(), Path("vllm_trie"), Path("tests"), EXTRAS, Path("tests/extras")):
        (folder / where).mkdir(exist_ok=True)
        left_out = names if where.name == "extras" else {"vllm_trie", "tests", "extras"}
        for path in (ROOT / where).iterdir():
            if path.name not in left_out or (path.name == "extras" and not where.parts):
                (folder / where / path.name).symlink_to(path)


def use(folder: Path) -> None:
    """Import the package and the tests from a folder only."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm_trie", "tests")]:
        del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if "vllm_trie" not in type(f).__module__]
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    os.chdir(folder)


def failing_imports() -> list[str]:
    """Import all modules of the package but the laboratory's; return those that fail."""
    failing = []
    package = importlib.import_module("vllm_trie")
    for module in pkgutil.walk_packages(package.__path__, "vllm_trie.", onerror=lambda name: None):
        if not module.name.startswith(("vllm_trie.lab", "vllm_trie.__main__")):
            try:
                importlib.import_module(module.name)
            except Exception as error:
                failing.append(f"{module.name}: {error!r}")
    return failing


def in_child(names: set[str], call: Callable[[], Any]) -> Any:
    """Return what a call does in a fork of this process, without some extras."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            with tempfile.TemporaryDirectory() as folder:
                copy_without(names, Path(folder))
                use(Path(folder))
                said = call()
        except BaseException:
            said = [traceback.format_exc()]
        with os.fdopen(writer, "w") as pipe:
            json.dump(said, pipe)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = json.load(pipe)
    os.wait()
    return said


def run_engine() -> dict[str, Any]:
    """Run the engine of :mod:`tests.engine.without_extras`."""
    result: dict[str, Any] = importlib.import_module("tests.engine.without_extras").run()
    return result


def run_tests() -> int:
    """Run the tests of modules that ask extras; return pytest's status."""
    return int(importlib.import_module("pytest").main(["-q", "-n0", *TESTS]))


def main() -> None:
    command, *rest = sys.argv[1:] or ["all"]
    if command == "run":
        at = rest.index("--")
        with tempfile.TemporaryDirectory() as folder:
            copy_without({*rest[:at]}, Path(folder))
            use(Path(folder))
            sys.argv = rest[at + 1 :]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    import vllm.v1.worker.gpu.model_runner  # noqa: F401  once, for all children

    if command == "imports":
        for name in rest:
            for line in in_child({*name.split(",")}, failing_imports):
                print(f"{name}: {line}")
        return
    from vllm_trie.extras import EXTRAS as extras

    result = {
        "imports": {name: in_child({name}, failing_imports) for name in extras},
        "imports without all": in_child({*extras}, failing_imports),
        "engine": in_child({*extras}, run_engine),
        "tests": in_child({*extras}, run_tests),
    }
    print("RESULT " + json.dumps(result))
    sys.exit(result["tests"] != 0)


if __name__ == "__main__":
    main()
