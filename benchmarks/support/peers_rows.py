"""Rows and tables of peers.py from measured requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from support.harness import Row, print_table
from support.peers_engines import PARTS, PEERS, PLAIN, Load, Measured, Question

MEAN = "mean"


def summarize(
    workload: str,
    methods: Sequence[str],
    questions: Sequence[Question | Load],
    measurements: dict[tuple[int, str], list[Measured]],
) -> list[Row]:
    """Return a row for each category and method; a category's figure pools its questions.

    Args:
        workload: named in the rows.
        methods: the baseline of the ratios is `plain`, if it is among them.
        questions: as asked.
        measurements: (question, method) -> one measurement for each repeat.
    """
    rows = []
    for category in dict.fromkeys(question.category for question in questions):
        indices = [i for i, question in enumerate(questions) if question.category == category]
        totals = {method: _total(measurements, indices, method) for method in methods}
        plain = totals.get(PLAIN)
        expected = {
            i: questions[i].answer or (measurements[i, PLAIN][0].output if plain else None)
            for i in indices
        }
        for method, total in totals.items():
            tokens, steps = total["tokens"], max(total["steps"], 1)
            decoded = max(tokens - total["requests"], 1)
            same = [
                measured.output == (expected[i] or [])[: len(measured.output)]
                for i in indices
                for measured in measurements[i, method]
            ]
            has_answers = all(answer is not None for answer in expected.values())
            rows.append(
                {
                    "method": method,
                    "workload": workload,
                    "category": category,
                    "at_once": getattr(questions[indices[0]], "at_once", 1),
                    "tokens_per_s": tokens / total["seconds"],
                    "tokens_per_step": decoded / steps if total["steps"] else None,
                    "ratio_to_plain": _ratio(plain, total, "seconds", 0),
                    "decode_ratio_to_plain": _ratio(plain, total, "decode", 1),
                    "ms_per_output_token": 1e3 * total["decode"] / decoded,
                    "first_token_ms": 1e3
                    * (total["seconds"] - total["decode"])
                    / total["requests"],
                    "nodes_per_step": total["nodes"] / steps,
                    "ms_per_step": 1e3 * total["decode"] / steps,
                    **{f"{part}_ms_per_step": 1e3 * total[part] / steps for part in PARTS},
                    "questions": int(total["requests"]),
                    "tokens": tokens,
                    "identical": all(same) if has_answers else None,
                    "identical_share": sum(same) / len(same) if has_answers else None,
                }
            )
    return rows


def _ratio(
    plain: dict[str, float] | None, total: dict[str, float], seconds: str, first: int
) -> float | None:
    """Return plain's time per token over a method's, without the `first` tokens of each request."""
    if plain is None:
        return None
    tokens = [max(sums["tokens"] - first * sums["requests"], 1) for sums in (plain, total)]
    return plain[seconds] / tokens[0] / (total[seconds] / tokens[1])


def _total(
    measurements: dict[tuple[int, str], list[Measured]], indices: Sequence[int], method: str
) -> dict[str, float]:
    """Sum over the questions; times are medians over the repeats, the rest is from the first."""
    total: dict[str, float] = dict.fromkeys(
        ("seconds", "decode", "tokens", "steps", "nodes", "requests", *PARTS), 0.0
    )
    for index in indices:
        repeats = measurements[index, method]
        total["tokens"] += len(repeats[0].output)
        total["steps"] += repeats[0].steps
        total["nodes"] += repeats[0].nodes
        total["requests"] += repeats[0].requests
        total["seconds"] += median(repeat.seconds for repeat in repeats)
        total["decode"] += median(repeat.seconds - repeat.first_token_seconds for repeat in repeats)
        for part in PARTS:
            total[part] += median(repeat.parts[part] for repeat in repeats)
    return total


def with_means(rows: Sequence[Row]) -> list[Row]:
    """Return the rows and, for each workload and method, the mean over the categories.

    Loads of several requests at once are no part of it.

    In the rows of this project's methods, `ratio_to_best_peer` is the mean of a ratio to plain over
    the largest such mean that one of vLLM's own drafters has (in a category: over the fastest).
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("at_once", 1) == 1:
            groups[row["workload"], row["method"]].append(row)
    means = []
    for (workload, method), group in groups.items():
        mean: Row = {"method": method, "workload": workload, "category": MEAN}
        for key in group[0]:
            if key in mean or key in ("questions", "tokens", "machine", "at_once"):
                continue
            values = [row.get(key) for row in group]
            if key == "identical":
                mean[key] = None if None in values else all(values)
            else:
                mean[key] = None if None in values else fmean(values)
        means.append(mean)
    rows = [*rows, *means]
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["method"] in PEERS and row["ratio_to_plain"]:
            place = row["workload"], row["category"]
            best[place] = max(best.get(place, 0.0), row["ratio_to_plain"])
    for row in rows:
        ratio, peer = row["ratio_to_plain"], best.get((row["workload"], row["category"]))
        is_ours = row["method"] not in (PLAIN, *PEERS)
        row["ratio_to_best_peer"] = ratio / peer if is_ours and ratio and peer else None
    return rows


def print_breakdown(rows: Sequence[Row]) -> None:
    """Print the time of a step by part: averaged over the categories, and of each load.

    A load's times are for each request of a step, prefills included.
    """
    lines = []
    for row in rows:
        if row["category"] == MEAN or row.get("at_once", 1) > 1:
            values = [row[f"{part}_ms_per_step"] for part in PARTS]
            step = row["ms_per_step"]
            lines.append(
                [
                    *(row["workload"], row["category"], row["method"]),
                    *(row["nodes_per_step"], step, *values),
                    *(step - sum(values), row["ratio_to_best_peer"]),
                ]
            )
    if lines:
        columns = (
            "workload",
            "category",
            "method",
            "nodes",
            "step",
            *PARTS,
            "rest",
            "over best peer",
        )
        print_table(columns, lines, "Milliseconds of a step after the first token")
