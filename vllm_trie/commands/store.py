"""The commands `vllm-trie store ...`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from vllm_trie.store.store_file import StoreError, StoreHeader, read_store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Files of a warm start (option `store_path`). They hold text of users.",
)

_Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Store files, *.store.")]


@app.callback()
def store() -> None:
    pass  # keeps a group of one command a group


@app.command()
def info(files: _Files) -> None:
    """Check store files and say what is in them; exit 1 if one cannot be used."""
    failed = False
    for path in files:
        try:
            header, texts = read_store(path)
        except StoreError as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
            continue
        salted = sum(bool(text.salt) for text in texts)
        _describe(path, header)
        typer.echo(f"  {salted} texts of {header.num_salts} cache salts or adapters")
    raise typer.Exit(int(failed))


def _describe(path: Path, header: StoreHeader) -> None:
    saved = datetime.fromtimestamp(min(max(header.saved_at, 0.0), 1e11), UTC)
    typer.echo(
        f"{path}: {header.num_texts} texts, {header.num_tokens} tokens, model {header.model!r}, "
        f"tokenizer {header.tokenizer[:16] or 'none'} ({header.vocab_size} tokens), saved "
        f"{saved:%Y-%m-%d %H:%M:%S} UTC"
    )
