"""The frame of the benchmarks."""

from __future__ import annotations

import json

from support import harness


def test_smoke_sets_options_that_later_ones_change():
    parser = harness.option_parser("", smoke={"widths": [2], "tokens": 4})
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args(["--smoke", "--tokens", "5"])
    assert (options.repeats, options.widths, options.tokens) == (1, [2], 5)
    assert parser.parse_args([]).widths == [4, 8]


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


def test_rows_are_printed_and_written(tmp_path, capsys):
    rows = [{"method": "plain", "ms": 0.12345, "hidden": 1}, {"method": "trees", "ms": None}]
    harness.finish(rows, tmp_path / "rows.json", ["method", "ms"])
    assert "0.123" in capsys.readouterr().out
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [{k: v for k, v in row.items() if k != "machine"} for row in written] == rows
