"""Errors of the commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


def in_a_folder(file: Path | None) -> Path | None:
    """Return the file that an option names for the results, minutes before they are there.

    Raises:
        typer.BadParameter: Its folder does not exist.
    """
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(
            f"{str(file.parent)!r} is no folder; create it, or name a file elsewhere"
        )
    return file


@contextmanager
def errors_end_the_command() -> Iterator[None]:
    """Print an error of the block that a user can mend, and exit with status 1."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
