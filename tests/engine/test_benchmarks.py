"""Every benchmark runs with `--smoke`: its printing and JSON."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.benchmark_runs import RECORDED, commands
from tests.processes import run_program

COMPARED = ("futures", "lookahead", "medusa", "peers")
"""Programs that compare the outputs of their methods."""


@pytest.fixture(scope="module")
def runs():
    done: Any = run_program("tests.engine.benchmark_runs")
    return {" ".join(run["command"]): run for run in done}


@pytest.mark.parametrize("command", [" ".join(command) for command in commands()])
def test_a_smoke_run_prints_and_writes(runs, command):
    run = runs[command]
    assert run["status"] == 0, run["printed"][-6000:]
    assert run["printed"].count("┃") > 2, "no table"
    assert run["rows"]
    if run["command"][0] in COMPARED:
        assert all(row["identical"] is True for row in run["rows"])


def test_peers_draft_recorded_answers(runs):
    [rows] = (run["rows"] for command, run in runs.items() if "--workload replay" in command)
    assert {"method", "workload", "category", "tokens_per_s", "tokens_per_step"} <= rows[0].keys()
    assert {"2 at once", "mean"} < {row["category"] for row in rows}
    plain, *drafting = (row for row in rows if row["category"] == "mean")
    assert [row["method"] for row in (plain, *drafting)] == [*RECORDED]
    assert (plain["tokens_per_step"], plain["nodes_per_step"]) == (1, 0)
    # The answers are in the prompts: drafts succeed, and a tree has to be verified for it.
    assert all(row["tokens_per_step"] > 1.5 for row in drafting)
    assert drafting[1]["nodes_per_step"] > 1
