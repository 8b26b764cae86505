"""Trained drafters in a union on Model Runner V2: vLLM's own runner and speculators on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import needs_triton
from tests.processes import run_program

pytestmark = needs_triton


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_program("tests.engine.v2_neural_run")


def test_greedy_tokens_are_those_of_plain_v2(results) -> None:
    """With prompts in parts, preemptions, a prefix cache and aborts, scheduled asynchronously."""
    union = results["union"]
    assert union["own"]
    assert union["async"]
    assert union["greedy"] == []
    assert union["preempted"] > 0
    assert union["accepted"] > 0
    assert not any(union["failures"].values())
    assert union["blocks_lost"] == 0


def test_chains_accept_what_vllms_own_method_accepts(results) -> None:
    vllms, ours = results["alone"]["own"], results["alone"]["ours"]
    assert vllms["differences"] == ours["differences"] == []
    assert vllms["accepted"] == ours["accepted"] > 0


def test_waits_for_the_device(results) -> None:
    """Those of vLLM's own method, and, after the first step, for the sampled tokens and the
    chains; documented in docs/lab_engine.md."""
    (least, most, _), ours = (results["alone"][name]["waits"]["step"] for name in ("own", "ours"))
    assert (ours[0], ours[1]) == (least, most + 2)
    assert ours[2] > 10
