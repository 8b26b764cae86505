"""Errors of the commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_end_the_command() -> Iterator[None]:
    """Print an error of the block that a user can mend, and exit with status 1."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
