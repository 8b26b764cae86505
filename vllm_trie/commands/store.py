"""The commands `vllm-trie store ...`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from vllm_trie.commands.shared import errors_end_the_command
from vllm_trie.store.folder import Identity, merge_texts
from vllm_trie.store.store_file import (
    MAX_TOKENS,
    Store,
    StoreError,
    StoreHeader,
    read_store,
    write_store,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Files of a warm start (option `store_path`). They hold text of users.",
)

_Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Store files, *.store.")]


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


@app.command()
def merge(
    files: _Files,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write, *.store to be read.")
    ],
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens to keep, those used last.")
    ] = MAX_TOKENS,
) -> None:
    """Merge store files of one model."""
    with errors_end_the_command():
        stores = sorted(map(read_store, files), key=lambda store: -store.header.saved_at)
        _check_same_model(stores)
        texts = merge_texts([store.texts for store in stores], max_tokens)
        _describe(output, write_store(output, stores[0].header, texts))


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A store file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The *.jsonl to write.")],
) -> None:
    """Write the texts as token ids, for `vllm-trie corpus build`; those with a salt are left out.

    A corpus is drafted from for every request, so texts that belong to a cache salt or an adapter
    may not go into one.
    """
    with errors_end_the_command():
        texts = read_store(file).texts
        shared = [text for text in texts if not text.salt]
        output.touch(mode=0o600)
        with output.open("w", encoding="utf-8") as lines:
            for text in shared:
                lines.write(json.dumps({"token_ids": text.token_ids.tolist()}) + "\n")
    left_out = len(texts) - len(shared)
    typer.echo(f"{output}: {len(shared)} texts; {left_out} with a cache salt or adapter left out")


def _check_same_model(stores: list[Store]) -> None:
    identities = {Identity.of(store.header) for store in stores}
    if len(identities) > 1:
        names = ", ".join(sorted({repr(identity.model) for identity in identities}))
        raise StoreError(
            f"the files are of models or tokenizers that differ ({names}); merge those of one model"
        )


def _describe(path: Path, header: StoreHeader) -> None:
    saved = datetime.fromtimestamp(min(max(header.saved_at, 0.0), 1e11), UTC)
    typer.echo(
        f"{path}: {header.num_texts} texts, {header.num_tokens} tokens, model {header.model!r}, "
        f"tokenizer {header.tokenizer[:16] or 'none'} ({header.vocab_size} tokens), saved "
        f"{saved:%Y-%m-%d %H:%M:%S} UTC"
    )
