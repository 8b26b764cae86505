"""Every benchmark runs with `--smoke`: its printing and JSON."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.benchmark_runs import commands
from tests.processes import run_program


@pytest.fixture(scope="module")
def runs():
    done: Any = run_program("tests.engine.benchmark_runs")
    return {" ".join(run["command"]): run for run in done}


@pytest.mark.parametrize("command", map(" ".join, commands()))
def test_a_smoke_run_prints_and_writes(runs, command):
    run = runs[command]
    assert run["status"] == 0, run["printed"][-6000:]
    assert run["printed"].count("┃") > 2, "no table"
    assert run["rows"]
    assert all(row.get("identical") in (None, True) for row in run["rows"])
