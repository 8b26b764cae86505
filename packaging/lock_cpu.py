"""Resolve requirements/cpu.txt: every package of the CPU set-up, pinned (`make lock`).

Versions already in the file are kept where they still fit; `--upgrade` and the other options of
`uv pip compile` can be given.
"""

import subprocess
import sys

from setup_cpu import (
    INPUT,
    LOCK,
    OVERRIDES,
    ROOT,
    VENV,
    VENV_PYTHON,
    pip_settings,
    uv_environment,
)


def main():
    listing = subprocess.run(
        [str(VENV_PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    env = uv_environment(pip_settings(listing))
    torch_backend = [] if env.get("UV_FIND_LINKS") else ["--torch-backend", "cpu"]
    command = [VENV / "bin" / "uv", "pip", "compile", "--quiet"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--extra", "dev", "--overrides", OVERRIDES.relative_to(ROOT)]
    command += ["--custom-compile-command", "make lock", "--output-file", LOCK.relative_to(ROOT)]
    command += [*torch_backend, *sys.argv[1:], INPUT.relative_to(ROOT), "pyproject.toml"]
    return subprocess.run([str(part) for part in command], env=env, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
