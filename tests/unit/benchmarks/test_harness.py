"""The frame of the benchmarks."""

from __future__ import annotations

from support import harness


def test_runs_take_turns():
    order: list[str] = []

    def run(name: str) -> str:
        order.append(name)
        return name.upper()

    timed = harness.interleave({"a": lambda: run("a"), "b": lambda: run("b")}, 3)
    assert "".join(order) == "abbaab"
    assert [result for _, result in timed["b"]] == ["B"] * 3
    assert harness.median_seconds([(3.0, None), (1.0, None), (2.0, None)]) == 2.0
    slower = [(3.0, None), (4.0, None), (20.0, None)]
    assert harness.median_ratio(slower, [(1.0, None), (2.0, None), (4.0, None)]) == 3.0
