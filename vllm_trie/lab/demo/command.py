"""The command `vllm-trie demo`."""

from __future__ import annotations

import importlib.util
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

from vllm_trie.command_errors import in_a_folder
from vllm_trie.lab import local_engine, models, smollm2

if TYPE_CHECKING:
    from vllm_trie.lab.demo.measure import ObservedStep, Row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


_PEERS: dict[str, dict[str, Any]] = {
    "ngram": local_engine.NGRAM,
    "suffix": {},
}
"""vLLM's own methods that need no second model, and their options: those of benchmarks/peers.py."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that decide what is measured."""

    model: str
    is_shipped: bool
    method: str
    nodes: int
    batch_size: int
    max_tokens: int
    repeats: int
    verbose: bool


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or name of a chat model; if left out, SmolLM2-135M-Instruct "
            "(`smollm2`), or the shipped one where that cannot be fetched."
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="Speculative method.")] = "ngram_trie",
    nodes: Annotated[int, typer.Option(min=1, max=256, help="Nodes of a draft tree.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, max=64, help="Prompts that run together.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest answer.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt.")] = 2,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", callback=in_a_folder, help="Also write the results to this file."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own messages.")] = False,
) -> None:
    """Decode chats with plain vLLM, with its own drafters and with draft trees, in turns.

    Exit status 1 if any output differs.
    """
    from vllm_trie.drafts import available_methods
    from vllm_trie.lab.demo import report

    if method not in available_methods():
        raise typer.BadParameter(
            f"{method!r} is not a method; allowed: {', '.join(available_methods())}",
            param_hint="--method",
        )
    path, reason = _found(model)
    settings = Settings(
        path, models.is_shipped(path), method, nodes, batch_size, max_tokens, repeats, verbose
    )
    rows = _run(settings, reason)
    if json_path is not None:
        flat = report.json_rows(rows, nodes, batch_size)
        json_path.write_text(json.dumps(flat, indent=1) + "\n", encoding="utf-8")
    if not rows[-1].identical:
        raise typer.Exit(1)


def _run(settings: Settings, reason: str) -> list[Row]:
    """Measure, print and draw; return the rows of the table.

    Args:
        settings: What is measured.
        reason: Why the model is not the one that was meant.
    """
    from vllm_trie.lab.demo import report

    is_shipped = settings.is_shipped
    threads = local_engine.ENVIRONMENT if is_shipped else local_engine.with_all_cores()
    local_engine.set_environment(settings.verbose, threads)
    # Engines start with the terminal's streams redirected, so the console keeps its own.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as terminal:
        console = Console(file=terminal, highlight=False)
        console.print(
            f"[bold]vllm-trie demo[/]: plain vLLM and [bold]{settings.method}[/] with "
            f"{settings.nodes} nodes, batch size {settings.batch_size}"
        )
        model = report.describe(settings.model, is_shipped)
        console.print(f"model: {model}{reason}\n", soft_wrap=True)
        rows, answers, drawn, decode = _measure(console, settings)
        console.print(report.comparison_table(rows))
        console.print(report.verdict(rows))
        console.print()
        console.print(report.answers_table(answers))
        console.print(f"\n[dim]{report.notes(is_shipped, settings.method)}[/]\n")
        report.show_step(console, drawn, decode)
    return rows


def _found(model: str | None) -> tuple[str, str]:
    """Return the model's folder or name, and why it is not the one that was meant."""
    if model is not None:
        return models.model_or_shipped(model), ""
    try:
        return models.model_or_shipped(smollm2.NAME), ""
    except typer.BadParameter as error:
        return models.model_or_shipped(None), f"; {error}"


def _measure(
    console: Console, settings: Settings
) -> tuple[list[Row], dict[str, str], ObservedStep | None, Any]:
    """Start the engines, which live until the process ends, and measure.

    Returns:
        A row for each batch and one for all, the answers by prompt, the step to draw, and the
        tokenizer's `decode`.
    """
    from vllm_trie.lab.demo import chat_prompts, measure
    from vllm_trie.lab.tiny_model import chat_prompts as prompts_about_code

    prompts = (prompts_about_code if settings.is_shipped else chat_prompts).chat_prompts()
    groups = local_engine.batches(range(len(prompts)), settings.batch_size)
    with _progress(console) as progress:
        configs = _speculative_configs(settings)
        num_runs = len(groups) * len(configs) * settings.repeats
        task = progress.add_task("loading vLLM", total=2 * len(configs) + num_runs)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        with local_engine.silence(not settings.verbose):
            from vllm import SamplingParams
        decode, token_ids = _tokenized(settings.model, [prompt.message for prompt in prompts])
        length = local_engine.checked_length(
            settings.model, token_ids, settings.max_tokens, settings.nodes
        )
        params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
        rows, answers = [], dict[str, str]()
        observed: list[ObservedStep] = []
        with local_engine.silence(not settings.verbose):
            engines = _start_engines(settings, configs, length, advance)
            short = SamplingParams(temperature=0.0, max_tokens=8)
            for name, llm in engines.items():
                advance(f"warming up, {name}")
                local_engine.generate(llm, token_ids[: settings.batch_size], short)
            for group in groups:
                names = [prompts[index].name for index in group]
                some = [token_ids[index] for index in group]
                row, outputs, steps = measure.compare(
                    engines, names, some, params, settings.repeats, advance
                )
                rows.append(row)
                texts = [decode(output, skip_special_tokens=True) for output in outputs]
                answers |= dict(zip(names, texts, strict=True))
                observed += steps
            drawn = measure.most_telling(observed)
    return [*rows, measure.total(rows)], answers, drawn, decode


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=console,
        transient=True,
        # What vLLM writes is silenced by its file descriptors, which Rich would go around.
        redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip


def _start_engines(
    settings: Settings,
    configs: dict[str, dict[str, Any] | None],
    length: int,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Return the engines by name, in the order of `configs`."""
    engines: dict[str, Any] = dict.fromkeys(configs)
    # `ngram` imports numba, beside whose modules vLLM 0.32 starts no further engine.
    for name in sorted(configs, key="ngram".__eq__):
        advance(f"starting vLLM, {name}")
        engines[name] = local_engine.start_engine(
            settings.model,
            max_model_len=length,
            max_num_seqs=settings.batch_size,
            speculative_config=configs[name],
        )
    return engines


def _tokenized(path: str, messages: Sequence[str]) -> tuple[Any, list[list[int]]]:
    """Return the tokenizer's `decode`, and the chat prompt of each message."""
    from vllm_trie.lab.tiny_model.chat_prompts import chat_tokens

    tokenizer = local_engine.load_tokenizer(path)
    if not tokenizer.chat_template:
        raise typer.BadParameter(
            f"{path!r} has no chat template; take a chat model", param_hint="--model"
        )
    return tokenizer.decode, [chat_tokens(tokenizer, message) for message in messages]


def _speculative_configs(settings: Settings) -> dict[str, dict[str, Any] | None]:
    """Return vLLM's `speculative_config` by engine: plain vLLM, its own methods, the method."""
    peers = dict(_PEERS)
    if importlib.util.find_spec("arctic_inference") is None:
        del peers["suffix"]
    return {
        "plain": None,
        **{
            peer: {"method": peer, **options, **local_engine.without_memory(peer)}
            for peer, options in peers.items()
        },
        settings.method: models.speculative_config(settings.method, settings.model, settings.nodes),
    }
