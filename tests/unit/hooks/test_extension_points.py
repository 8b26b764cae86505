"""Extension points, and the patches that add them to vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_trie.vllm_hooks.ledger import EXTENSION_POINTS, entries, offered
from vllm_trie.vllm_hooks.ledger.extension_points import REGISTERED

SERIES = Path(__file__).parents[3] / "patches"
POINT_ROW = re.compile(r"^\| (?P<number>\d{4}) \| .* \| (?P<points>.+) \|$", re.M)
"""A row of the README's table of the series; its table of the ledger is generated."""


def test_the_readme_names_the_point_of_every_patch() -> None:
    numbers = {}
    for row in POINT_ROW.finditer((SERIES / "README.md").read_text()):
        for point in re.findall(r"`(\w+)`", row["points"]):
            numbers[point] = row["number"]
    assert numbers == {point: number for point, (number, _) in EXTENSION_POINTS.items()}


def test_every_point_is_what_its_patch_adds() -> None:
    for point, (number, symbol) in EXTENSION_POINTS.items():
        [patch] = (SERIES / "vllm-0.32.0").glob(f"{number}-*.patch")
        name = symbol.rpartition(":")[2].rpartition(".")[2]
        added = [line for line in patch.read_text().splitlines() if line.startswith("+")]
        assert any(re.search(rf"\b{name}\b", line) for line in added), (point, number)


def test_entries_and_registrations_name_points_that_exist() -> None:
    assert {patch.point for patch in entries()} - {""} <= EXTENSION_POINTS.keys()
    served = {(patch.feature, patch.point) for patch in entries() if patch.wrapper}
    assert REGISTERED.keys() <= served


def test_stock_vllm_offers_none() -> None:
    assert [point for point in EXTENSION_POINTS if offered(point)] == []
