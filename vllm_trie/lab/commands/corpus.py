"""The commands `vllm-trie corpus ...`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from vllm_trie.command_errors import errors_end_the_command, in_a_folder
from vllm_trie.extras.corpus.corpus_file import (
    CorpusHeader,
    open_corpus,
    read_header,
    write_corpus,
)
from vllm_trie.files.tokenizers import fingerprint, load_tokenizer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Corpora that `ngram_trie` drafts from (its option `corpus`).",
)

_Output = Annotated[
    Path, typer.Option("--output", "-o", callback=in_a_folder, help="The corpus file to write.")
]


@app.command()
def build(
    sources: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="FILE...",
            help="*.jsonl: a document a line, its text in the field 'text' or its token ids in "
            "'token_ids'. *.npy: the token ids of a document. Other files: text, a document each.",
        ),
    ],
    output: _Output,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="The target model's tokenizer: a folder or name as Hugging Face has them, or a "
            "SentencePiece file."
        ),
    ],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the tokenizer.")
    ] = False,
) -> None:
    """Index texts and write them as one corpus file, about 60 to 150 bytes a token."""
    with errors_end_the_command():
        loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
        documents = (
            document
            for source in track(sources, "reading", console=Console(stderr=True), transient=True)
            for document in _read_documents(source, loaded.encode)
        )
        header = write_corpus(output, documents, loaded.vocab_size, fingerprint(loaded.vocabulary))
    _describe(output, header)


@app.command()
def info(
    corpus: Annotated[Path, typer.Argument(help="A corpus file.")],
    check: Annotated[bool, typer.Option(help="Read the whole file and check it.")] = True,
) -> None:
    """Describe a corpus file, and check that it is whole."""
    with errors_end_the_command():
        header = read_header(corpus)
        if check:
            open_corpus(corpus)
    _describe(corpus, header)


@app.command()
def synthesize(
    model: Annotated[str, typer.Argument(help="The target model: a folder or a name.")],
    output: _Output,
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens of answers to make.")] = 300_000,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Your own questions, one a line, or *.jsonl with a field 'prompt', 'question', "
            "'text' or 'turns'. Left out, the model writes them.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of the answers: the one that will be served.")
    ] = 0.0,
    question_tokens: Annotated[
        int, typer.Option(min=8, help="Longest question that the model writes.")
    ] = 160,
    answer_tokens: Annotated[int, typer.Option(min=8, help="Longest answer.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Requests that are decoded at once.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of questions and sampled answers.")] = 0,
    engine: Annotated[
        str,
        typer.Option(
            help="Further options of vllm.LLM as JSON, as '{\"tensor_parallel_size\": 2}'."
        ),
    ] = "{}",
) -> None:
    """Let the model ask itself questions and answer them; write the answers as a corpus.

    They are also in OUTPUT.answers.jsonl: a run that was interrupted, or that is to make more
    tokens, goes on from there.
    """
    from vllm_trie.lab.corpus.synthesis import Plan
    from vllm_trie.lab.corpus.synthesize import run

    plan = Plan(tokens, temperature, question_tokens, answer_tokens, seed, 2 * batch)
    with errors_end_the_command():
        engine_args = json.loads(engine)
        if not isinstance(engine_args, dict):
            raise ValueError(f"--engine {engine}: a JSON object of vllm.LLM's options is needed")
        header = run(model, output, plan, prompts, batch, engine_args)
    _describe(output, header)


def _describe(path: Path, header: CorpusHeader) -> None:
    typer.echo(
        f"{path}: {header.num_documents} documents, {header.num_tokens} tokens, "
        f"{path.stat().st_size / 1e6:.1f} MB, tokenizer {header.tokenizer[:16]} "
        f"({header.vocab_size} tokens)"
    )


def _read_documents(path: Path, encode: Callable[[str], list[int]]) -> Iterator[np.ndarray]:
    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"{path}: token ids must be a one-dimensional integer array, this is "
                f"{array.dtype} {list(array.shape)}"
            )
        yield _as_tokens(array, path)
    elif path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read_line(line, f"{path}, line {number}", encode)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from None
        yield np.array(encode(text), dtype=np.int32)


def _read_line(line: bytes, where: str, encode: Callable[[str], list[int]]) -> np.ndarray:
    try:
        document = json.loads(line.decode())
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    text = document.get("text") if isinstance(document, dict) else None
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where} has a lone surrogate in 'text', {text[error.start]!r}, which is no "
                "character; remove it"
            ) from None
        return np.array(encode(text), dtype=np.int32)
    tokens = document.get("token_ids") if isinstance(document, dict) else None
    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
        return _as_tokens(np.array(tokens, dtype=object), where)  # of any size
    raise ValueError(f"{where} has neither 'text' (a string) nor 'token_ids' (integers)")


def _as_tokens(array: np.ndarray, where: Path | str) -> np.ndarray:
    limits = np.iinfo(np.int32)
    if len(array) and (array.min() < 0 or array.max() > limits.max):
        raise ValueError(f"{where} has token ids outside of [0, {limits.max}]")
    return array.astype(np.int32)
