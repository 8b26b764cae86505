"""The newer vLLM of the support window, of which there is no build for CPUs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests.processes import ROOT, one_at_a_time

VERSION = os.environ.get("NEWER_VLLM", "0.33.0")


@functools.cache
def newer_vllm(version: str = VERSION) -> dict[str, str]:
    """Return the environment of programs with its Python files over the installed compiled ones;
    skip the test where the package index does not have it."""
    folder = ROOT / ".venv" / f"vllm-{version}"
    with one_at_a_time():
        if not folder.exists():
            temporary = f"{folder}-{os.getpid()}"
            script = [sys.executable, "packaging/newer_vllm.py", version, temporary]
            done = subprocess.run([*script, "--with", "orjson"], cwd=ROOT, capture_output=True)
            if done.returncode != 0:
                last = done.stderr.decode().splitlines()[-1:]
                pytest.skip(f"vLLM {version} cannot be had: {last}")
            os.rename(temporary, folder)
    # What vLLM keeps of each model class is that of the release that looked at it last.
    return {"PYTHONPATH": str(folder), "VLLM_CACHE_ROOT": f"{folder}-cache"}
