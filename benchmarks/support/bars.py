"""Bar charts: a group of bars for each category, a bar for each method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

COLOURS = ("#4878a8", "#8fb3d3", "#c9a24d", "#3b8c5a", "#8f5aa8", "#777777")


def draw_bars(
    values: Mapping[tuple[str, str], float],
    path: Path,
    *,
    title: str,
    ylabel: str,
    footnote: str,
) -> list[Path]:
    """Write a chart as PNG and SVG.

    Args:
        values: (category, method) -> height, in the order of the chart.
        path: of the files, without their ending; its folder is created if it is missing.

    Returns:
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "peers"  # the same values give the same file
    path.parent.mkdir(parents=True, exist_ok=True)
    categories = list(dict.fromkeys(category for category, _ in values))
    methods = list(dict.fromkeys(method for _, method in values))
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        places = [i + (number - (len(methods) - 1) / 2) * width for i in range(len(categories))]
        heights = [values.get((category, method), 0.0) for category in categories]
        colour = COLOURS[number % len(COLOURS)]
        bars = axes.bar(places, heights, width * 0.92, label=method, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), [name.replace("_", " ") for name in categories])
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel(ylabel)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, ncols=len(methods))
    figure.supxlabel(footnote, fontsize=5, color="#555555")
    written = []
    for ending, metadata in (("png", None), ("svg", {"Date": None})):
        written.append(path.with_name(f"{path.name}.{ending}"))
        figure.savefig(written[-1], dpi=110, metadata=metadata)
    pyplot.close(figure)
    return written
