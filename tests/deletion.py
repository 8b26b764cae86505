"""The package without some of its extras, in a process of its own.

python -m tests.deletion imports NAME ...
python -m tests.deletion run NAME ... -- MODULE ARGUMENT ...
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

from tests.checkout import ROOT

EXTRAS = Path("vllm_trie/extras")


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


def in_child(names: set[str]) -> list[str]:
    """Return what :func:`failing_imports` does in a fork of this process."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            with tempfile.TemporaryDirectory() as folder:
                copy_without(names, Path(folder))
                use(Path(folder))
                said = failing_imports()
        except BaseException:
            said = [traceback.format_exc()]
        with os.fdopen(writer, "w") as pipe:
            pipe.write("\n".join(said))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    os.wait()
    return lines


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "imports":
        import vllm.v1.worker.gpu.model_runner  # noqa: F401  once, for all children

        for name in rest:
            for line in in_child({*name.split(",")}):
                print(f"{name}: {line}")
        return
    at = rest.index("--")
    with tempfile.TemporaryDirectory() as folder:
        copy_without({*rest[:at]}, Path(folder))
        use(Path(folder))
        sys.argv = rest[at + 1 :]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
