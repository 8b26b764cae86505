"""Bar charts of peers.py: speed over plain vLLM by category and method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.bars import draw_bars
from support.harness import Row, machine
from support.peers_engines import PLAIN

TITLES = {
    "chat": "chats on SmolLM2-135M-Instruct, or another model; the model's own answers",
    "shipped": "the model that ships with the project (3.5 M parameters, float32)",
    "replay": "replay model: recorded answers of Spec-Bench, dummy weights of a {shape} shape; "
    "real engine",
    "beam": "beam search, over sampling as many outputs",
}


def plot(rows: Sequence[Row], folder: Path, shape: str) -> list[Path]:
    """Write peers-WORKLOAD.png and .svg for each workload that has ratios.

    Args:
        rows: of peers.py.
        folder: created if it is missing.
        shape: of the replay model, for the title.

    Returns:
        The files written.
    """
    written = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        some = [
            row
            for row in rows
            if row["workload"] == workload and row["ratio_to_plain"] and row["method"] != PLAIN
        ]
        if some:
            written += draw_bars(
                {(row["category"], row["method"]): row["ratio_to_plain"] for row in some},
                folder / f"peers-{workload}",
                title=TITLES[workload].format(shape=shape),
                ylabel="speed over plain vLLM",
                footnote=some[0].get("machine") or machine(),
            )
    return written
