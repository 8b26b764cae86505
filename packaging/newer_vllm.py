"""Lay the Python files of another release of vLLM over the CPU build that is installed.

    .venv/bin/python packaging/newer_vllm.py 0.33.0 FOLDER --with orjson
    PYTHONPATH=FOLDER .venv/bin/python -m pytest tests/engine/test_exactness.py

The CPU build of vLLM lags behind the GPU build on PyPI. Nearly all that the plugin touches is
Python, and the same in both: so the wheel of the GPU build (some 340 MB) gives the Python files and
the installed CPU build the compiled ones. What this does not show is a change in the compiled part
or in torch. The wheel stays in the user's cache folder for the next time.
"""

import argparse
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from vllm_trie.lab.check.other_vllm import download
from vllm_trie.refusal import RefusedError

NOT_TAKEN = (".so", ".pyd", ".ptx", ".cubin")


def lay_over(wheel, installed, folder):
    """Unpack `vllm/` of a wheel into `folder`, with links to the compiled files in `installed`.

    Args:
        wheel: file of the release whose Python files are wanted.
        installed: the package folder of the installed vLLM.
        folder: goes in front of everything else on Python's path; made if missing.

    Returns:
        The number of files unpacked and the number of links.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "vllm").exists():
        raise SystemExit(f"error: {folder / 'vllm'} exists; remove it or name another folder")
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name
            for name in archive.namelist()
            if name.startswith("vllm/") and not name.endswith(("/", *NOT_TAKEN))
        ]
        archive.extractall(folder, names)
    compiled = sorted(Path(installed).glob("*.so"))
    for path in compiled:
        (folder / "vllm" / path.name).symlink_to(path.resolve())
    return len(names), len(compiled)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="release of vLLM, such as 0.33.0")
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--wheel", type=Path, help="a wheel that has been downloaded before")
    parser.add_argument(
        "--with", dest="packages", nargs="*", default=[], help="what that release needs besides"
    )
    given = parser.parse_args()
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise SystemExit("error: vLLM's CPU build is not installed; run this with .venv/bin/python")
    [installed] = found.submodule_search_locations
    try:
        wheel = given.wheel or download(given.version, print)
    except RefusedError as error:
        raise SystemExit(f"error: {error}") from None
    files, links = lay_over(wheel, installed, given.folder)
    if given.packages:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", given.folder]
        subprocess.run([*command, *given.packages], check=True)
    print(f"{files} files of vLLM {given.version}, {links} compiled files of {installed}")
    print(f"PYTHONPATH={given.folder.resolve()}")


if __name__ == "__main__":
    main()
