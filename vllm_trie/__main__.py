"""The `vllm-trie` command, where a package that it needs may be missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; a missing package ends it with one line."""
    try:
        from vllm_trie.cli import main as run

        run()
    except ModuleNotFoundError as error:
        if "." in (error.name or "."):  # a part of a package that is there
            raise
        how = " (pip install vllm, or docs/cpu.md for CPUs)" if error.name == "vllm" else ""
        sys.exit(
            f"error: the package {error.name!r} is not installed; install it{how}, and vllm-trie "
            "with its dependencies"
        )


if __name__ == "__main__":
    main()
