"""Extension points, their patches and the table that tells of them."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_trie.vllm_hooks.ledger.check import all_hooks
from vllm_trie.vllm_hooks.ledger.extension_points import EXTENSION_POINTS, offered

PATCHES = Path(__file__).parents[3] / "patches"
ROW = re.compile(r"^\| `(?P<target>vllm\.[^`]+)` \| (?P<feature>\w+) \| (?P<place>.+) \|$", re.M)
"""A row of the ledger's table in the README."""
POINT_ROW = re.compile(r"^\| (?P<number>\d{4}) \| .* \| (?P<points>.+) \|$", re.M)
"""A row of the table of patches."""


def readme() -> str:
    return (PATCHES / "README.md").read_text()


def patch_of_point() -> dict[str, str]:
    found = {}
    for row in POINT_ROW.finditer(readme()):
        for point in re.findall(r"`(\w+)`", row["points"]):
            found[point] = row["number"]
    return found


def test_every_line_of_the_ledger_is_in_the_table() -> None:
    rows = {(row["target"], row["feature"]): row["place"] for row in ROW.finditer(readme())}
    hooks = {(hook.target, hook.feature): hook for hook in all_hooks()}
    assert rows.keys() == hooks.keys()
    patches = patch_of_point()
    for key, hook in hooks.items():
        if hook.extension_point:
            assert rows[key].startswith(patches[hook.extension_point]), key
        else:
            assert rows[key].startswith("no patch: "), key


def test_every_point_has_its_patch() -> None:
    patches = patch_of_point()
    assert patches.keys() == EXTENSION_POINTS.keys()
    for point, number in patches.items():
        [patch] = (PATCHES / "vllm-0.32.0").glob(f"{number}-*.patch")
        name = EXTENSION_POINTS[point].rpartition(":")[2].rpartition(".")[2]
        added = [line for line in patch.read_text().splitlines() if line.startswith("+")]
        assert any(re.search(rf"\b{name}\b", line) for line in added), (point, number)


def test_hooks_name_points_that_exist() -> None:
    assert {hook.extension_point for hook in all_hooks()} - {""} <= EXTENSION_POINTS.keys()


def test_stock_vllm_offers_none() -> None:
    assert [point for point in EXTENSION_POINTS if offered(point)] == []
