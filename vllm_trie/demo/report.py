"""What the demo shows: the table, the drawn tree, the JSON rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_trie.demo.measure import ObservedStep, Row
from vllm_trie.tree import draw_text

_SHOWN_BEFORE = 160  # characters of output shown before the drawn step


def comparison_table(rows: Sequence[Row], method: str) -> Table:
    """Plain vLLM beside the method; the last row is the sum of the others."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold"
    )
    table.add_column("prompt", overflow="fold")
    for name in (
        "\ntokens",
        "plain\ntok/s",
        f"{method}\ntok/s",
        "speed-\nup",
        "tokens\n/step",
        "nodes\n/step",
    ):
        table.add_column(name, justify="right")
    table.add_column("same\noutput")
    for row in rows:
        last = row is rows[-1]
        if last:
            table.add_section()
        table.add_row(
            escape(row.name),
            str(row.tokens),
            f"{row.plain_tokens_per_s:.0f}",
            f"{row.tree_tokens_per_s:.0f}",
            f"[{'green' if row.speed_up >= 1 else 'yellow'}]{row.speed_up:.2f}×[/]",
            f"{row.tokens_per_step:.2f}",
            f"{row.nodes_per_step:.1f}",
            "[green]yes[/]" if row.identical else "[bold red]NO[/]",
            style="bold" if last else None,
        )
    return table


def verdict(rows: Sequence[Row]) -> Text | Panel:
    """One line if all outputs are the same; a box that cannot be overlooked if not."""
    if rows[-1].identical:
        return Text("outputs identical: yes", style="bold green")
    wrong = "; ".join(row.name for row in rows[:-1] if not row.identical)
    return Panel(
        f"outputs identical: NO\n{escape(wrong)}\nSpeculation changed greedy output. This is a "
        "bug; please report it with the output of `vllm-trie doctor`.",
        style="bold red",
    )


def show_step(
    console: Console,
    step: ObservedStep,
    prompt_name: str,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Draw one step's tree under the text that it continues."""
    before, new = decode(step.output_before), decode(step.new_tokens)
    text = Text()
    if len(before) > _SHOWN_BEFORE:
        text.append("… ", style="dim")
    text.append(before[-_SHOWN_BEFORE:])
    text.append(new, style="bold green")
    console.print(
        f"[bold]One step's draft tree[/] (prompt “{escape(prompt_name)}”, step {step.step}): "
        f"{step.tree.num_nodes} nodes, verified in one forward pass. The model's own choices "
        f"follow the path marked ✓: {len(step.accepted)} accepted and a bonus token make "
        f"{len(step.new_tokens)} tokens from this step, [bold green]shown in green[/] here:"
    )
    console.print(Panel(text, expand=False, border_style="dim"))
    drawn = draw_text(step.tree, lambda token: decode([token]), step.accepted)
    for line in drawn.splitlines():
        console.print(Text(line, style="bold green" if line.endswith(" ✓") else ""), soft_wrap=True)


def notes(num_parameters: int | None, shipped: bool, method: str) -> str:
    """What the numbers mean and what they do not."""
    lines = [
        f"Greedy decoding in float32; times are medians of runs in turns. {escape(method)} lets "
        "the model itself check every drafted token, so it can change the speed, never the text."
    ]
    size = "" if num_parameters is None else _magnitude(num_parameters)
    if shipped:
        lines.append(
            f"The model has only {size} parameters and learnt from the source code of Python's "
            "standard library: it writes plausible code, not good code, and its answers are often "
            "wrong. Most of a step's time is vLLM's own work in Python. Tokens per step depend on "
            "how much an answer reuses of its context; the speed-up also on what a step costs. "
            "So try your own model, on your own machine: `vllm-trie demo --model PATH`."
        )
    elif size:
        lines.append(f"The model has {size} parameters.")
    return "\n".join(lines)


def _magnitude(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number < 1e9 else f"{number / 1e9:.1f} B"


def json_rows(
    rows: Sequence[Row], method: str, nodes: int, batch_size: int
) -> list[dict[str, Any]]:
    """Flat rows, two for each row of the table: plain and the method."""
    flat: list[dict[str, Any]] = []
    for row in rows:
        shared = {"prompt": row.name, "batch_size": batch_size, "tokens": row.tokens}
        flat.append(
            shared
            | {
                "method": "plain",
                "nodes": 0,
                "tokens_per_s": row.plain_tokens_per_s,
                "tokens_per_step": 1.0,
                "nodes_per_step": 0.0,
                "speed_up": 1.0,
                "identical": True,
            }
        )
        flat.append(
            shared
            | {
                "method": method,
                "nodes": nodes,
                "tokens_per_s": row.tree_tokens_per_s,
                "tokens_per_step": row.tokens_per_step,
                "nodes_per_step": row.nodes_per_step,
                "speed_up": row.speed_up,
                "identical": row.identical,
            }
        )
    return flat
