"""The command `vllm-trie demo`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_trie import local_engine

if TYPE_CHECKING:
    from vllm_trie.demo.measure import ObservedStep, Row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that decide what is measured."""

    model: str
    method: str
    nodes: int
    batch_size: int
    max_tokens: int
    repeats: int
    verbose: bool
    html: Path | None = None


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Folder or name of a chat model; the shipped one if left out."),
    ] = None,
    method: Annotated[str, typer.Option(help="Speculative method.")] = "ngram_trie",
    nodes: Annotated[int, typer.Option(min=1, max=256, help="Nodes of a draft tree.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, max=64, help="Prompts that run together.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt.")] = 3,
    svg: Annotated[Path | None, typer.Option(help="Also draw the tree into this SVG file.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also show one answer step by step in this HTML file.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own messages.")] = False,
) -> None:
    """Decode real prompts with plain vLLM and with draft trees, side by side.

    Exit status 1 if any output differs.
    """
    from vllm_trie.demo import report
    from vllm_trie.drafters import available_methods
    from vllm_trie.tiny_model import model_path

    if method not in available_methods():
        raise typer.BadParameter(
            f"{method!r} is not a method; allowed: {', '.join(available_methods())}",
            param_hint="--method",
        )
    local_engine.set_environment(verbose)
    if model is None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = _or_exit(model_path) if model is None else model
    settings = Settings(path, method, nodes, batch_size, max_tokens, repeats, verbose, html)
    # Engines start with the terminal's streams redirected, so the console keeps its own.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as terminal:
        console = Console(file=terminal, highlight=False)
        console.print(
            f"[bold]vllm-trie demo[/]: plain vLLM and [bold]{method}[/] with {nodes} nodes, "
            f"batch size {batch_size}\n"
        )
        rows, drawn, decode = _measure(console, settings)
        console.print(report.comparison_table(rows, method))
        console.print(report.verdict(rows))
        note = report.notes(report.num_parameters(path), model is None, method)
        console.print(f"\n[dim]{note}[/]\n")
        report.show_step(console, drawn, decode, svg)
        if html is not None:
            console.print(f"\nThe same answer step by step: {html}")
    if json_path is not None:
        flat = report.json_rows(rows, method, nodes, batch_size)
        json_path.write_text(json.dumps(flat, indent=1) + "\n", encoding="utf-8")
    if not rows[-1].identical:
        raise typer.Exit(1)


def _measure(console: Console, settings: Settings) -> tuple[list[Row], ObservedStep | None, Any]:
    """Start the engines, which live until the process ends, and measure.

    Returns:
        A row for each batch and one for all, the step to draw, and the tokenizer's `decode`.
    """
    from vllm_trie.demo import measure
    from vllm_trie.tiny_model.chat_prompts import chat_prompts

    prompts = chat_prompts()
    groups = local_engine.batches(range(len(prompts)), settings.batch_size)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        num_runs = len(groups) * (2 + 2 * settings.repeats)
        task = progress.add_task("loading vLLM", total=3 + num_runs)

        def advance(what: str | None = None) -> None:
            progress.update(task, advance=1, description=what)

        with local_engine.silence(not settings.verbose):
            from vllm import SamplingParams
        decode, token_ids = _tokenized(settings.model, [prompt.message for prompt in prompts])
        length = _checked_length(settings, max(map(len, token_ids)))
        params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
        rows, observed = [], []
        with local_engine.silence(not settings.verbose):
            limits: dict[str, Any] = {"max_model_len": length, "max_num_seqs": settings.batch_size}
            advance("starting plain vLLM")
            plain = local_engine.start_engine(settings.model, **limits)
            advance(f"starting vLLM with {settings.method}")
            trees = local_engine.start_engine(
                settings.model, **limits, speculative_config=_speculative_config(settings)
            )
            advance("measuring, in turns")
            for group in groups:
                names = [prompts[index].name for index in group]
                some = [token_ids[index] for index in group]
                row, steps = measure.compare(
                    plain, trees, names, some, params, settings.repeats, advance
                )
                rows.append(row)
                observed += steps
            drawn = measure.most_telling(observed)
            if settings.html is not None:
                names = [prompt.name for prompt in prompts]
                shown = names.index(drawn.prompt) if drawn is not None else 0
                engines = {"plain": plain, settings.method: trees}
                content = _page(engines, token_ids[shown], params, decode)
                settings.html.write_text(content, encoding="utf-8")
    return [*rows, measure.total(rows)], drawn, decode


def _page(engines: dict[str, Any], prompt: Sequence[int], params: Any, decode: Any) -> str:
    """Return the page of one answer by each engine."""
    from vllm_trie.explore import page
    from vllm_trie.explore.record import record

    traces = [record(llm, name, prompt, params) for name, llm in engines.items()]
    return page(traces, decode, title="vllm-trie demo")


def _tokenized(path: str, messages: Sequence[str]) -> tuple[Any, list[list[int]]]:
    """Return the tokenizer's `decode`, and the chat prompt of each message."""
    from transformers import AutoTokenizer

    from vllm_trie.tiny_model.chat_prompts import chat_tokens

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise typer.BadParameter(
            f"{path!r} cannot be loaded ({reason}); give the folder of a Hugging Face model or a "
            "name on the hub",
            param_hint="--model",
        ) from None
    if not tokenizer.chat_template:
        raise typer.BadParameter(
            f"{path!r} has no chat template; take a chat model", param_hint="--model"
        )
    return tokenizer.decode, [chat_tokens(tokenizer, message) for message in messages]


def _checked_length(settings: Settings, longest: int) -> int:
    """Return the engines' `max_model_len`."""
    max_tokens, nodes = settings.max_tokens, settings.nodes
    length = local_engine.room_for(longest, max_tokens, nodes)
    limit = local_engine.text_config(settings.model).max_position_embeddings
    if length > limit:
        raise typer.BadParameter(
            f"{max_tokens} new tokens, the longest prompt and {nodes} nodes need {length} "
            f"positions, and the model has {limit}; take at most "
            f"{max_tokens + limit - length} tokens",
            param_hint="--max-tokens",
        )
    return length


def _speculative_config(settings: Settings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "method": settings.method,
        "num_speculative_tokens": settings.nodes,
        **local_engine.without_memory(settings.method),
    }
    if settings.method.startswith("medusa"):
        from vllm_trie.tiny_model import medusa_path

        config["model"] = _or_exit(medusa_path)
    return config


def _or_exit(find: Callable[[], Path]) -> str:
    try:
        return str(find())
    except FileNotFoundError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo with `arguments`, or those of the command line; return the exit status."""
    try:
        app(
            args=None if arguments is None else list(arguments),
            prog_name="vllm-trie demo",
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
