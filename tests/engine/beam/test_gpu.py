"""Beam search on the classes of a GPU's engine, as far as a CPU runs them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import needs_triton
from tests.processes import run_program


@pytest.fixture(scope="module")
def on_gpus_runners() -> dict[str, Any]:
    return run_program("tests.engine.beam.gpu_runners_run")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["rules and catalogues", "no prefix caching, synchronous", "beside chains", "beside trees"],
)
def test_hypotheses_are_those_of_transformers_on_a_gpus_runner(
    on_gpus_runners: dict[str, Any], case: str
) -> None:
    result = on_gpus_runners[case]
    assert result["compared"] >= 20
    assert result["beams_forked"] > 20
    if case == "rules and catalogues":  # whose check searches ahead, too
        assert result["start"][:2] == [None, True]
        assert "differ by" in result["start"][2]
        assert result["start"][3] == "RuntimeError: a fault of the device"
    assert result["groups_failed"] == result["blocks_lost"] == result["requests_left"] == 0
    if case.startswith("beside"):  # whose groups fight for blocks
        assert result["beams_preempted"] > 0
    if case != "no prefix caching, synchronous":
        # On V2, asynchronously, nobody waits but who fetches an output, once, and who drafts.
        waits = result["waits"]
        assert waits["step"][:2] == [0, int(case.startswith("beside"))], waits
        assert waits["output"][:2] == [1, 1], waits
        assert waits["output"][2] > 50, waits
