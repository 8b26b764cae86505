"""Starts that the plugin refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StartRefusedError(ValueError):
    """An engine that the plugin does not start; the message says why and what to do."""


@contextmanager
def refusing_start() -> Iterator[None]:
    """Raise what the plugin's checks find as a :class:`StartRefusedError`.

    At vLLM's command line it becomes one line and status 2, as argparse shows a wrong option: a
    traceback of vLLM's start would hide it.
    """
    try:
        yield
    except ValueError as error:
        if Path(sys.argv[0]).name == "vllm":
            command = " ".join(["vllm", *sys.argv[1:2]])
            print(f"{command}: error: {error}", file=sys.stderr)
            sys.exit(2)
        raise StartRefusedError(str(error)) from error
