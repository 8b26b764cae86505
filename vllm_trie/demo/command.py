"""The command `vllm-trie demo`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_trie.demo import engines
from vllm_trie.demo.prompts import chat_tokens, demo_prompts

if TYPE_CHECKING:
    from vllm_trie.demo.measure import ObservedStep, Row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own messages.")] = False,
) -> None:
    """Decode real prompts with plain vLLM and with draft trees, side by side.

    Exit status 1 if any output differs.
    """
    from vllm_trie.drafters import available_methods

    if method not in available_methods():
        raise typer.BadParameter(
            f"{method!r} is not a method; allowed: {', '.join(available_methods())}",
            param_hint="--method",
        )
    engines.set_environment(verbose)
    if model is None:
        from vllm_trie.tiny_model import model_path

        path = _or_exit(model_path)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    else:
        path = model
    # Engines are started with the terminal's streams turned away, so the console keeps its own.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as terminal:
        console = Console(file=terminal, highlight=False)
        console.print(
            f"[bold]vllm-trie demo[/]: plain vLLM and [bold]{method}[/] with {nodes} nodes, "
            f"batch size {batch_size}\n"
        )
        rows, step, decode, note = _run(
            console, str(path), method, nodes, batch_size, max_tokens, repeats, verbose,
            shipped=model is None,
        )  # fmt: skip
        _show(console, rows, step, decode, note, method, svg)
    if json_path is not None:
        from vllm_trie.demo.report import json_rows

        flat = json_rows(rows, method, nodes, batch_size)
        json_path.write_text(json.dumps(flat, indent=1) + "\n", encoding="utf-8")
    if not rows[-1].identical:
        raise typer.Exit(1)


def _run(
    console: Console,
    path: str,
    method: str,
    nodes: int,
    batch_size: int,
    max_tokens: int,
    repeats: int,
    verbose: bool,
    shipped: bool,
) -> tuple[list[Row], ObservedStep | None, Any, str]:
    """Start the engines and measure; the engines live until the process ends."""
    from vllm_trie.demo import measure, report

    prompts = demo_prompts()
    groups = measure.batches(prompts, batch_size)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(
            "loading vLLM", total=3 + len(groups) * (2 + 2 * repeats), start=True
        )

        def advance(what: str | None = None) -> None:
            progress.update(task, advance=1, description=what)

        with engines.silence(not verbose):
            from vllm import SamplingParams
        tokenizer, token_ids = _tokenized(path, [prompt.message for prompt in prompts])
        length = _checked_length(path, max(map(len, token_ids)), max_tokens, nodes)
        with engines.silence(not verbose):
            settings = {"max_model_len": length, "max_num_seqs": batch_size}
            advance("starting plain vLLM")
            plain = engines.start_engine(path, **settings)
            advance(f"starting vLLM with {method}")
            trees = engines.start_engine(
                path, **settings, speculative_config=_speculative_config(method, nodes)
            )
            advance("warming up")
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            counts, steps = [], []
            for group in groups:
                some = [token_ids[index] for index in group]
                measure.generate(plain, some, params)
                advance()
                found, observed = measure.observe(trees, some, params, first=group[0])
                counts += found
                steps += observed
                advance()
            progress.update(task, description="measuring, in turns")
            timings, identical, tokens = measure.compare(
                plain, trees, token_ids, params, batch_size, repeats, advance
            )
    rows = measure.summarize(
        [prompt.name for prompt in prompts], timings, identical, tokens, counts, batch_size
    )
    note = report.notes(engines.num_parameters(path), shipped, method)
    return rows, measure.most_telling(steps), tokenizer.decode, note


def _tokenized(path: str, messages: Sequence[str]) -> tuple[Any, list[list[int]]]:
    """The model's tokenizer, and each message as the chat prompt that its users would send."""
    from transformers import AutoTokenizer

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
    return tokenizer, [chat_tokens(tokenizer, message) for message in messages]


def _checked_length(path: str, longest: int, max_tokens: int, nodes: int) -> int:
    """The engines' `max_model_len`."""
    length = engines.room_for(longest, max_tokens, nodes)
    limit = engines.text_config(path).max_position_embeddings
    if length > limit:
        raise typer.BadParameter(
            f"{max_tokens} new tokens, the longest prompt and {nodes} nodes need {length} "
            f"positions, and the model has {limit}; take at most "
            f"{max_tokens + limit - length} tokens",
            param_hint="--max-tokens",
        )
    return length


def _show(
    console: Console,
    rows: Sequence[Row],
    step: ObservedStep | None,
    decode: Any,
    note: str,
    method: str,
    svg: Path | None,
) -> None:
    from vllm_trie.demo import report
    from vllm_trie.tree import draw_svg

    console.print(report.comparison_table(rows, method))
    console.print(report.verdict(rows))
    console.print(f"\n[dim]{note}[/]\n")
    if step is None:
        console.print("[yellow]No tree was drafted in any step, so there is none to draw.[/]")
        return
    report.show_step(console, step, demo_prompts()[step.prompt].name, decode)
    if svg is not None:
        drawn = draw_svg(step.tree, lambda token: decode([token]), step.accepted)
        svg.write_text(drawn, encoding="utf-8")
        console.print(f"\nThe same tree as a picture: {svg}")


def _speculative_config(method: str, nodes: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": nodes,
        **engines.without_memory(method),
    }
    if method.startswith("medusa"):
        from vllm_trie.tiny_model import medusa_path

        config["model"] = str(_or_exit(medusa_path))
    return config


def _or_exit(find: Any) -> Any:
    try:
        return find()
    except FileNotFoundError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; `arguments` are the command line's if left out. Returns the exit status."""
    try:
        app(
            args=None if arguments is None else list(arguments),
            prog_name="vllm-trie demo",
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
