"""The commands ``vllm-trie items ...``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_trie.command_errors import errors_end_the_command, in_a_folder
from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.sources import read_items
from vllm_trie.extras.items.trie_file import ItemsHeader, open_items, read_header

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Catalogues of items for constrained beam search (the request option `items`).",
)


class _Duplicates(StrEnum):
    refuse = "refuse"
    first = "first"


_Trie = Annotated[Path, typer.Argument(metavar="TRIE", help="A file that `items build` wrote.")]


@app.command()
def build(
    source: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="*.jsonl: an item a line, {'id': ..., 'tokens': [...]} or {'id': ..., 'text': "
            "...}. *.npy: an integer array of items x width, negative behind the last token; ids "
            "are the row numbers.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=in_a_folder, help="The file to write.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The target model's tokenizer, for texts and to check tokens: a folder or name "
            "as Hugging Face has them, or a SentencePiece file."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the tokenizer.")
    ] = False,
    duplicates: Annotated[
        _Duplicates,
        typer.Option(
            help="What to do with items that have equal tokens: refuse them, or keep the first."
        ),
    ] = _Duplicates.refuse,
) -> None:
    """Write items as one trie, about 40 bytes an item and the text of the ids."""
    with errors_end_the_command():
        encode = vocab_size = mark = None
        if tokenizer is not None:
            from vllm_trie.files.tokenizers import fingerprint, load_tokenizer

            loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
            encode, vocab_size = loaded.encode, loaded.vocab_size
            mark = fingerprint(loaded.vocabulary)
        items = read_items(source, encode, vocab_size)
        header = build_items(output, items, mark, duplicates.value)
    _describe(output, header)


@app.command()
def info(trie: _Trie) -> None:
    """Describe an item trie, from its header."""
    with errors_end_the_command():
        header = read_header(trie)
    _describe(trie, header)


@app.command()
def check(
    trie: _Trie,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Also check that tokens are below this number.")
    ] = None,
) -> None:
    """Read a whole item trie and check it; exit 1 if it cannot be used."""
    with errors_end_the_command():
        version = open_items(trie, vocab_size).version
    typer.echo(f"{trie}: good, version {version[:16]}")


def _describe(path: Path, header: ItemsHeader) -> None:
    size = path.stat().st_size
    lengths = f"{header.min_length} to {header.max_length}"
    typer.echo(
        f"{path}: {header.num_items} items of {lengths} tokens, {header.num_nodes} nodes with up "
        f"to {header.max_children} children, largest token {header.max_token}, ids of type "
        f"{header.ids}, {size / 1e6:.1f} MB ({size / header.num_items:.1f} bytes an item), "
        f"tokenizer {(header.tokenizer or 'not named')[:16]}"
    )
