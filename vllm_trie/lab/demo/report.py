"""Output of the demo: the table, the drawn tree, the JSON rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_trie.lab.demo.measure import PLAIN, ObservedStep, Row
from vllm_trie.lab.tree_text import draw_text

_SHOWN_BEFORE = 240  # characters of output shown before the drawn step
_JSON_KEYS = ("nodes", "tokens_per_step", "nodes_per_step", "identical")


def comparison_table(rows: Sequence[Row]) -> Table:
    """Return the table of the engines next to each other; the last row is the sum of the others."""
    engines = list(rows[0].seconds)
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold"
    )
    table.add_column("prompt", overflow="fold")
    for name in (
        "\ntokens",
        *(f"{engine}\ntok/s" for engine in engines),
        "speed-\nup",
        "tokens\n/step",
    ):
        table.add_column(name, justify="right")
    table.add_column("same\noutput")
    for row in rows:
        last = row is rows[-1]
        if last:
            table.add_section()
        speed_up = row.speed_up()
        color = "green" if speed_up >= 1 else "yellow"
        table.add_row(
            escape(row.name),
            str(row.tokens),
            *(f"{row.tokens_per_s(engine):.0f}" for engine in engines),
            f"[{color}]{speed_up:.2f}×[/]" if row.nodes else "no drafts",
            f"{row.tokens_per_step:.2f}",
            "[green]yes[/]" if row.identical else "[bold red]NO[/]",
            style="bold" if last else None,
        )
    return table


def verdict(rows: Sequence[Row]) -> Text | Panel:
    """Return the speed-up if all outputs are the same, a red box if not."""
    total = rows[-1]
    if total.identical and not total.nodes:
        return Text(f"outputs identical: yes\n{total.method} drafted nothing", style="bold yellow")
    if total.identical:
        text = f"outputs identical: yes\n{total.method}: {total.speed_up():.2f} × plain vLLM"
        if (peer := total.best_peer) is not None:
            of = " (the better of its own methods)" if len(total.seconds) > 3 else ""
            text += f", {total.speed_up(peer):.2f} × vLLM's {peer}{of}"
        return Text(text, style="bold green")
    wrong = "; ".join(row.name for row in rows[:-1] if not row.identical)
    return Panel(
        f"outputs identical: NO\n{escape(wrong)}\nSpeculation changed greedy output. This is a "
        "bug; please report it with the output of `vllm-trie doctor`.",
        style="bold red",
    )


def answers_table(answers: Mapping[str, str]) -> Table:
    """Return each answer next to the name of its prompt."""
    table = Table(box=None, show_header=False, pad_edge=False)
    width = max(map(len, answers), default=None)
    table.add_column(style="bold", no_wrap=True, min_width=width)
    for name, answer in answers.items():
        table.add_row(escape(name), escape(answer.strip()))
    return table


def show_step(
    console: Console,
    observed: ObservedStep | None,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Draw one step's tree under the text that it continues."""
    if observed is None:
        console.print("[yellow]No tree was drafted in any step, so there is none to draw.[/]")
        return
    step, accepted = observed.step, observed.step.accepted
    before, new = decode(observed.output_before), decode(step.tokens)
    text = Text()
    if len(before) > _SHOWN_BEFORE:
        text.append("… ", style="dim")
    text.append(before[-_SHOWN_BEFORE:])
    text.append(new, style="bold green")
    console.print(
        f"[bold]One step's draft tree[/] (prompt “{escape(observed.prompt)}”, step "
        f"{observed.number}): {step.tree.num_nodes} nodes, verified in one forward pass. The "
        f"model's own choices follow the path marked ✓: {len(accepted)} accepted and a bonus token "
        f"make {len(step.tokens)} tokens from this step, [bold green]shown in green[/] here:"
    )
    console.print(Panel(text, expand=False, border_style="dim"))
    drawn = draw_text(step.tree, lambda token: decode([token]), accepted)
    for line in drawn.splitlines():
        console.print(Text(line, style="bold green" if line.endswith(" ✓") else ""), soft_wrap=True)


def describe(model: str, is_shipped: bool) -> str:
    """Return the model's name and size."""
    size = num_parameters(model)
    parameters = "" if size is None else f", {_magnitude(size)} parameters"
    name = "the one that ships with the project" if is_shipped else escape(Path(model).name)
    return f"{name}{parameters}"


def notes(is_shipped: bool, method: str) -> str:
    """Return the explanation under the table."""
    text = (
        f"Greedy decoding in float32; times are medians of runs in turns. With {escape(method)} "
        "the model itself checks every drafted token: the speed can change, the text cannot. "
        "Tokens per step depend on how much of its context an answer reuses. Try your own model on "
        "your own machine: `vllm-trie demo --model PATH`."
    )
    if is_shipped:
        text += (
            "\nThe model was trained on the source code of Python's standard library. It writes "
            "plausible code, not good code, and its answers are often wrong. Most of a step's time "
            "is vLLM's own work in Python."
        )
    return text


def _magnitude(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number < 1e9 else f"{number / 1e9:.1f} B"


def num_parameters(model: str) -> int | None:
    """Return the number of weights in a model folder's files; None if it has no safetensors.

    The engine cannot tell: vLLM packs weights for the CPU's kernels and drops the originals.
    """
    from safetensors import safe_open

    total = 0
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, framework="numpy") as weights:
            names = weights.keys()
            total += sum(prod(weights.get_slice(name).get_shape()) for name in names)
    return total or None


def json_rows(rows: Sequence[Row], nodes: int, batch_size: int) -> list[dict[str, Any]]:
    """Return flat rows, one of each engine for each row of the table.

    Tokens and nodes of a step are known of plain vLLM and the method.
    """
    flat = []
    for row in rows:
        for engine, seconds in row.seconds.items():
            values: tuple[Any, ...] = (None, None, None, None)
            if engine == PLAIN:
                values = (0, 1.0, 0.0, True)
            elif engine == row.method:
                values = (nodes, row.tokens_per_step, row.nodes_per_step, row.identical)
            flat.append(
                {
                    "prompt": row.name,
                    "batch_size": batch_size,
                    "tokens": row.tokens,
                    "method": engine,
                    "tokens_per_s": row.tokens_per_s(engine),
                    "speed_up": row.seconds[PLAIN] / seconds,
                }
                | dict(zip(_JSON_KEYS, values, strict=True))
            )
    return flat
