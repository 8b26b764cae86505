"""The `vllm-trie` command, where a package that it needs may be missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; a missing package ends it with one line."""
    try:
        from vllm_trie.cli import main as run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "vllm_trie"):
            raise
        sys.exit(
            f"error: the package {package!r} is not installed; install vLLM (pip install vllm, or "
            "docs/cpu.md for CPUs), and vllm-trie with its dependencies"
        )


if __name__ == "__main__":
    main()
