"""A newcomer's first commands, from an empty home: those of the pages, and in bare surroundings."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clean_room import PAGES, Room, run_page, steps_of
from tests.processes import FORKED, wait_for
from tests.unit.docs.pages import page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl, which the pages use"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: str) -> str:
    """The folder of the fetched model; README's commands find it empty, the other pages' do not."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page(name: str, cache: str, tmp_path: Path) -> None:
    """Those of README start their processes as in production."""
    variables = {} if name == "README.md" else {"PYTHONPATH": str(FORKED)}
    outcomes = run_page(name, tmp_path, VLLM_TRIE_CACHE_DIR=cache, **variables)
    assert len(outcomes) == sum(step.reason is None for step in steps_of(page(name)))
    if name != "README.md":
        return
    printed = {outcome.text: outcome.output for outcome in outcomes}
    assert "outputs identical: yes" in printed["make demo"]
    assert "model: smollm2-135m-instruct" in printed["make demo"]
    answer, metrics = (text for command, text in printed.items() if command.startswith("curl"))
    assert '"finish_reason":' in answer
    assert "vllm:trie_draft_nodes_total{" in metrics
    [snippet] = (text for command, text in printed.items() if "snippet.py" in command)
    assert "def fibonacci(n):" in snippet


def test_no_index_no_compiler_and_no_home_that_can_be_written(tmp_path: Path) -> None:
    """The demo says why it has another model, and runs."""
    room = Room(tmp_path)
    printed = room.run(
        "make demo",
        PATH=room.path_without_compilers(),
        HOME="/dev/null/home",
        PIP_NO_INDEX="1",
        PYTHONPATH=str(FORKED),
    )
    assert "smollm2 cannot be made: " in printed
    assert "outputs identical: yes" in printed


def test_two_first_starts_at_once(tmp_path: Path) -> None:
    """By both spellings, with one empty home."""
    rooms = []
    for spelling in ("--spec-method", "--speculative-model"):
        (folder := tmp_path / spelling).mkdir()
        rooms.append((Room(folder), f"vllm serve MODEL {spelling} ngram_trie"))
    home = str(rooms[0][0].home)
    with ExitStack() as stack:
        started = [
            (room, stack.enter_context(room.running(command, HOME=home, PYTHONPATH=str(FORKED))))
            for room, command in rooms
        ]
        for room, process in started:

            def is_ready(room: Room = room) -> bool:
                return "Application startup complete" in room.log.read_text(errors="replace")

            wait_for(is_ready, process, room.log)
            assert "vllm-trie is on: ngram_trie" in room.log.read_text()
