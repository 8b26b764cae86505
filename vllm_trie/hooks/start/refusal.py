"""Starts that the plugin refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_trie.refusal import RefusedError


@contextmanager
def refusing_start() -> Iterator[None]:
    """Show what the plugin's checks refuse at vllm's command line as argparse does.

    It becomes one line and status 2: a traceback of vLLM's start would hide it.
    """
    try:
        yield
    except RefusedError as error:
        if Path(sys.argv[0]).name == "vllm":
            command = " ".join(["vllm", *sys.argv[1:2]])
            print(f"{command}: error: {error}", file=sys.stderr)
            sys.exit(2)
        raise
