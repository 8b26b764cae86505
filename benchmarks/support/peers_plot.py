"""Bar charts of peers.py: speed over plain vLLM by category and method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.harness import Row, machine
from support.peers_engines import PLAIN

TITLES = {
    "shipped": "the model that ships with the project (3.5 M parameters, float32)",
    "replay": "replay model: recorded answers of Spec-Bench, dummy weights of a {shape} shape; "
    "real engine",
    "beam": "beam search, over sampling as many outputs",
}
COLOURS = ("#4878a8", "#8fb3d3", "#c9a24d", "#3b8c5a", "#8f5aa8", "#777777")


def plot(rows: Sequence[Row], folder: Path, shape: str) -> list[Path]:
    """Write peers-WORKLOAD.png and .svg for each workload that has ratios.

    Args:
        rows: of peers.py.
        folder: created if it is missing.
        shape: of the replay model, for the title.

    Returns:
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "peers"  # the same rows give the same file
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        some = [
            row
            for row in rows
            if row["workload"] == workload and row["ratio_to_plain"] and row["method"] != PLAIN
        ]
        if not some:
            continue
        categories = list(dict.fromkeys(row["category"] for row in some))
        methods = list(dict.fromkeys(row["method"] for row in some))
        ratio = {(row["category"], row["method"]): row["ratio_to_plain"] for row in some}
        figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
        width = 0.8 / len(methods)
        for number, method in enumerate(methods):
            places = [i + (number - (len(methods) - 1) / 2) * width for i in range(len(categories))]
            heights = [ratio.get((category, method), 0.0) for category in categories]
            colour = COLOURS[number % len(COLOURS)]
            bars = axes.bar(places, heights, width * 0.92, label=method, color=colour)
            axes.bar_label(bars, fmt="%.2f", fontsize=6)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(categories)), [c.replace("_", " ") for c in categories])
        axes.tick_params(axis="x", labelsize=7)
        axes.set_ylabel("speed over plain vLLM")
        axes.set_title(TITLES[workload].format(shape=shape), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, ncols=len(methods))
        figure.supxlabel(some[0].get("machine") or machine(), fontsize=5, color="#555555")
        for ending, metadata in (("png", None), ("svg", {"Date": None})):
            path = folder / f"peers-{workload}.{ending}"
            figure.savefig(path, dpi=110, metadata=metadata)
            written.append(path)
        pyplot.close(figure)
    return written
