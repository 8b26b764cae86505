"""The command `vllm-trie validate`."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_trie.lab import local_engine, models
from vllm_trie.lab.check.parts import Part, Settings, all_parts
from vllm_trie.lab.check.processes import run_parts
from vllm_trie.lab.check.report import Report, safe_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DTYPES = ("float32", "bfloat16", "float16")


@app.command()
def validate(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or name, or `smollm2`; the shipped one if left out."),
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
    path = models.model_or_shipped(model)
    usual = _dtypes(path, quick)
    parts = _parts(quick, dtype or usual, part or ())
    console = Console(stderr=True, highlight=False)
    command = " ".join(["vllm-trie", *sys.argv[1:]])
    report = Report(command=command, model=path, started=datetime.now(UTC))
    _write(report, json_path)
    # The processes of parts end with this one, whoever ends it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="vllm-trie-") as folder, console.status("") as status:
        heads = heads or models.shipped_heads(path)
        settings = Settings(model=path, heads=heads, quick=quick, folder=Path(folder))
        for done in run_parts(
            parts,
            settings,
            limit,
            starting=lambda part: status.update(
                f"{part.name}, part {parts.index(part) + 1} of {len(parts)}"
            ),
        ):
            console.print(f"[{done.seconds:5.0f} s] {done.name}: {done.status}", markup=False)
            report.parts.append(done)
            _write(report, json_path)
    report.finished = True
    if report.passed:
        device = next((part.measured for part in report.parts if "platform" in part.measured), {})
        report.safe = safe_options(parts, report.parts, device.get("platform", {}).get("device"))
    _write(report, json_path)
    print(report.markdown(), end="")
    if not report.passed:
        raise typer.Exit(1)


def _parts(quick: bool, dtypes: list[str], names: Sequence[str]) -> list[Part]:
    if unknown := set(dtypes) - set(DTYPES):
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: allowed are {', '.join(DTYPES)}", param_hint="--dtype"
        )
    parts = all_parts(quick, list(dict.fromkeys(dtypes)))
    for name in names:
        if not any(part.name.startswith(name) for part in parts):
            raise typer.BadParameter(
                f"no part begins with {name!r}; there are "
                + ", ".join(repr(part.name) for part in parts),
                param_hint="--part",
            )
    chosen = [part for part in parts if not names or part.name.startswith(tuple(names))]
    needed = {parts[0].name, *(part.needs for part in chosen)}  # the first one names the device
    return [part for part in parts if part in chosen or part.name in needed]


def _dtypes(model: str, quick: bool) -> list[str]:
    """Return float32, and without `quick` the model's own dtype."""
    model_dtype = "bfloat16"
    if not models.is_shipped(model):
        model_dtype = str(local_engine.text_config(model).dtype).removeprefix("torch.")
    if quick or model_dtype not in DTYPES:
        return ["float32"]
    return list(dict.fromkeys(["float32", model_dtype]))


def _write(report: Report, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write: {error}", param_hint="--json") from None
