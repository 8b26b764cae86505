"""The page in a real browser: keys, pointer, themes, length, hostile text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, Tab, chromium
from tests.unit.lab.explore.samples import WORDS, decode, generation, search
from vllm_trie.lab.explore.page import page

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: `make test` installs it as root, with apt-get"
)


def readable(text: str) -> str:
    """The text as the page shows it: characters that reorder or break lines are written out."""
    return text.replace("\u202e", "\\u{202e}").replace("\u2028", "\\u{2028}")


TRACES = [generation("plain", 90, 0), generation("ngram_trie", 90, 2, 1)]
LONG = generation("trie_union", 1800, 0.9, 2)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    contents = {
        "short": page(TRACES, decode, search(24), "<b>sample</b>"),
        "long": page([LONG._replace(end="steps")], decode, search(300, 8)),
        "beams": page([], decode, search(5, 2)),
        "empty": page([TRACES[0]._replace(steps=[], end="missing")], decode),
    }
    for name, content in contents.items():
        (folder / f"{name}.html").write_text(content, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in contents}


@pytest.fixture(scope="module")
def _browser() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def show(_browser: Tab, pages: dict[str, Path]) -> Iterator[Callable[..., Tab]]:
    """Open a page; after the test, check that nothing failed and nothing was fetched."""
    _browser.problems.clear()
    _browser.requests.clear()

    def opened(name: str, **look: Any) -> Tab:
        _browser.look(**look)
        _browser.open(pages[name])
        return _browser

    yield opened
    _browser.run("0")  # takes in the events so far
    assert _browser.problems == []
    assert {address.partition("#")[0] for address in _browser.requests} <= {
        path.as_uri() for path in pages.values()
    }
    assert _browser.run("window.pwned") is None


def place(tab: Tab) -> int:
    """The number of the step that the page says it shows; all its parts show the same."""
    number = int(tab.run("document.querySelector('#place b').textContent"))
    assert int(tab.run("document.getElementById('slider').value")) == number - 1
    if not tab.run("document.getElementById('runs-view').hidden"):
        marked = tab.run("[...document.querySelectorAll('#text .now')].map(e => e.dataset.step)")
        assert marked == [str(number - 1)]
        facts = tab.run("document.querySelector('#trees section .facts').textContent")
        assert re.match(rf"step {number} ·", facts)
    return number


def test_keys(show: Callable[..., Tab]) -> None:
    tab = show("short")
    tab.press("1")
    tab.press("Home")
    for keys, expected in (("jj", 3), ("k", 2), (["ArrowRight"], 3), (["ArrowLeft"] * 9, 1)):
        for key in keys:
            tab.press(key)
        assert place(tab) == expected
    tab.press("2")
    last = len(TRACES[1].steps)
    for key, expected in (("End", last), ("j", last), ("Home", 1)):
        tab.press(key)
        assert place(tab) == expected
    tab.press(" ")
    deadline = time.monotonic() + 20
    while int(tab.run("document.querySelector('#place b').textContent")) < 3:
        assert time.monotonic() < deadline, "it does not play"
        time.sleep(0.1)
    tab.press(" ")
    assert place(tab) >= 3


def test_the_text_and_the_trees_are_those_of_the_trace(show: Callable[..., Tab]) -> None:
    tab = show("short")
    tab.press("2")
    steps = TRACES[1].steps
    shown = tab.run("[...document.querySelectorAll('#text span')].map(e => e.textContent)")
    assert shown == [readable(decode(step.tokens)) for step in steps]
    index = max(range(len(steps)), key=lambda number: len(steps[number].accepted))
    tab.run(f"document.querySelector('#text [data-step=\"{index}\"]').click()")
    assert place(tab) == index + 1
    step = steps[index]
    count = "document.querySelectorAll('#trees section.active {}').length"
    assert tab.run(count.format("g.node tspan")) == len(step.nodes) + 1
    assert tab.run(count.format("g.node.taken tspan")) == len(step.accepted) > 2
    assert tab.run(count.format("g.node.bonus tspan")) == 1
    # Nodes without siblings share a box.
    num_boxes = tab.run(count.format("g.node"))
    assert 2 < num_boxes < len(step.nodes)
    chips = (
        "[...document.querySelectorAll('#trees section.active .taken li')].map(e => e.className)"
    )
    assert tab.run(chips) == ["accepted"] * len(step.accepted) + ["bonus"]
    probabilities = "[...document.querySelectorAll('#trees .active .share')].length"
    assert tab.run(probabilities) == num_boxes - 1


def test_it_opens_on_the_richest_step(show: Callable[..., Tab]) -> None:
    tab = show("short")
    accepted = [len(step.accepted) for step in TRACES[1].steps]
    best = place(tab)
    assert accepted[best - 1] == max(accepted)
    active = "document.querySelector('.lane[aria-pressed=true] {}').textContent"
    assert tab.run(active.format("b")) == "ngram_trie"
    assert re.fullmatch(r"\d\.\d\d×", tab.run(active.format(".strong")))
    assert "scoring x" in tab.run("document.getElementById('about').textContent")
    tab.click("[data-key=s]")
    steps = TRACES[1].steps[1:]
    worst = max(range(len(steps)), key=lambda n: steps[n].seconds / len(steps[n].tokens))
    assert place(tab) == worst + 2
    tab.press("m")
    assert place(tab) == best
    tab.press("b")  # a search has neither
    assert tab.run("document.querySelectorAll('.jump[hidden], #about[hidden]').length") == 3


def test_steps_without_a_draft_say_why(show: Callable[..., Tab]) -> None:
    tab = show("short")
    reason = "document.querySelector('#trees section.active .empty').textContent"
    tab.press("Home")
    assert "computed the prompt" in tab.run(reason)
    undrafted = [step.no_draft for step in TRACES[1].steps]
    index = undrafted.index("budget")
    tab.run(f"document.querySelector('#text [data-step=\"{index}\"]').click()")
    assert "worth its time" in tab.run(reason)


def test_phones_show_all_figures(show: Callable[..., Tab]) -> None:
    tab = show("short", width=400)
    seen = tab.run(
        "[...document.querySelectorAll('.lane:not(.head) span')].map(e => e.clientWidth > 20 && "
        "e.getBoundingClientRect().right <= innerWidth)"
    )
    assert seen == [True] * 5 * len(TRACES)
    assert tab.run("document.documentElement.scrollWidth") <= 400


def test_pointer(show: Callable[..., Tab]) -> None:
    tab = show("short")
    tab.press("Home")
    tab.click('[aria-label="Next step"]')
    tab.click('[aria-label="Next step"]')
    assert place(tab) == 3
    tab.click(".lane:nth-of-type(2) b")
    assert (
        tab.run("document.querySelector('.lane[aria-pressed=true] b').textContent") == "ngram_trie"
    )
    tab.click("#chart .steps", 0.999)
    assert place(tab) == len(TRACES[1].steps)
    tab.click("#text [data-step='4']")
    assert place(tab) == 5
    tab.click("#slider", 0.0)
    assert place(tab) == 1
    tab.click(".lane:nth-of-type(2) .track", 0.5)
    starts = [0]
    for step in TRACES[1].steps:
        starts.append(starts[-1] + len(step.tokens))
    assert starts[place(tab) - 1] <= 45 <= starts[place(tab)]
    tab.click("#tab-beams")
    assert place(tab) == 1
    tab.click("#blocks-chart .steps", 0.999)
    assert place(tab) == 24


def test_a_thousand_steps(show: Callable[..., Tab]) -> None:
    tab = show("long")
    count = len(LONG.steps)
    assert count > 900
    assert "truncated" in tab.run("document.querySelector('.notice').textContent")
    # The chart scrolls with the current step.
    cursor = (
        "(() => { const [box, at] = ['.scroll', '.cursor'].map(name => "
        "document.querySelector(`#chart ${name}`).getBoundingClientRect());"
        "return [at.left >= box.left && at.right <= box.right + 1, at.left - box.left] })()"
    )
    tab.press("Home")
    assert tab.run(cursor) == [True, 0]
    tab.press("End")
    assert place(tab) == count
    assert tab.run(cursor)[0]
    assert tab.run("document.querySelector('#chart .scroll').scrollLeft") > 900
    # The whole is drawn, but only so much of it is in the document.
    assert tab.run("document.querySelectorAll('*').length") < count + 400
    visible = "(() => { const now = document.querySelector('.now').getBoundingClientRect(),"
    visible += "panel = document.getElementById('text').getBoundingClientRect();"
    visible += "return now.top >= panel.top - 2 && now.bottom <= panel.bottom + 40 })()"
    assert tab.run(visible)
    tab.press("b")
    tab.press("End")
    assert place(tab) == search(300, 8).search.steps > 200
    assert tab.run("document.querySelectorAll('#search g.node').length") <= 16 * 3 * 8


def test_beams(show: Callable[..., Tab]) -> None:
    tab = show("beams")
    assert tab.run("document.getElementById('views').hidden")
    trace = search(5, 2).search
    for kind in ("kept", "finished"):
        shown = tab.run(f"document.querySelectorAll('#search g.{kind}').length")
        assert shown == trace.fates.count(kind), kind
    dropped = {p for p, fate in zip(trace.parents, trace.fates, strict=True) if fate == "dropped"}
    assert tab.run("document.querySelectorAll('#search g.dropped').length") == len(dropped)
    texts = tab.run("[...document.querySelectorAll('.hypothesis')].map(e => e.textContent)")
    assert len(texts) == len(trace.returned)
    # The prompt's three full blocks are shared; each row has a tail of its own.
    for _ in range(2):
        tab.press("j")
    rows = tab.run("[...document.querySelectorAll('#blocks tr')].map(e => e.cells.length)")
    assert rows == [3, 3]
    assert tab.run("document.querySelectorAll('#blocks td.shared').length") == 2
    assert tab.run("document.querySelectorAll('#blocks td.tail').length") == 2
    title = tab.run("document.getElementById('blocks-title').textContent")
    assert title == "5 KV blocks of 16 tokens in use, 8 without sharing"


def test_hostile_text_is_shown(show: Callable[..., Tab]) -> None:
    tab = show("short")
    assert tab.run("document.getElementById('title').textContent") == "<b>sample</b>"
    assert tab.run("document.scripts.length") == 2
    assert tab.run("document.images.length") == 0
    assert tab.run("document.querySelectorAll('h1 b, #text *:not(span)').length") == 0
    text = tab.run("document.getElementById('text').textContent")
    assert text == readable(decode([t for step in TRACES[0].steps for t in step.tokens]))
    assert WORDS[21] in text
    assert WORDS[24] not in text
    # Labels that are names of every object's properties.
    assert json.loads(tab.run("JSON.stringify(data.labels)"))["26"] == "constructor"
    # Even a script that found its way in would not run.
    tab.run("document.body.append(Object.assign(document.createElement('script'),"
            "{textContent: 'window.pwned = 1'}))")  # fmt: skip
    tab.run("document.body.insertAdjacentHTML('beforeend', '<p onclick=\"pwned = 1\">x</p>');"
            "document.body.lastElementChild.click()")  # fmt: skip
    assert len(tab.problems) >= 1
    assert all("Content Security Policy" in problem for problem in tab.problems)
    tab.problems.clear()


def luminance(color: str) -> float:
    parts = [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(show: Callable[..., Tab], scheme: str) -> None:
    tab = show("short", scheme=scheme)
    for _ in range(8):
        tab.press("j")

    def contrasts() -> dict[str, float]:
        pairs = {"ink": ("card", "page", "soft", "accent-soft", "green-soft", "amber-soft")}
        pairs |= {"ink ": tuple(f"step{number}" for number in range(6))}
        pairs |= {"dim": ("card", "page", "soft"), "amber": ("card",), "green": ("card",)}
        ratios = {}
        for text, grounds in pairs.items():
            for ground in grounds:
                probe = (
                    "(() => { const e = document.createElement('p'); document.body.append(e);"
                    f"e.style = 'color: var(--{text.strip()}); background: var(--{ground})';"
                    "const s = getComputedStyle(e), r = [s.color, s.backgroundColor];"
                    "e.remove(); return r })()"
                )
                low, high = sorted(map(luminance, tab.run(probe)))
                ratios[f"{text} on {ground}"] = (high + 0.05) / (low + 0.05)
        return ratios

    grounds = []
    for _ in range(2):
        assert {pair: ratio for pair, ratio in contrasts().items() if ratio < 4.5} == {}
        grounds.append(luminance(tab.run("getComputedStyle(document.body).backgroundColor")))
        tab.press("t")
    assert (grounds[0] > grounds[1]) == (scheme == "light")


def test_every_control_has_a_name(show: Callable[..., Tab]) -> None:
    tab = show("short")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "tab", "tabpanel", "region", "image", "checkbox")
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in roles
        and not node.get("name", {}).get("value")
    ]
    assert unnamed == []
    # The first control that the keyboard reaches shows its focus.
    tab.press("Tab")
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_trace_without_steps(show: Callable[..., Tab]) -> None:
    tab = show("empty")
    for key in ("j", "End", " ", "2", "b", "t"):
        tab.press(key)
    assert "truncated" in tab.run("document.querySelector('.notice').textContent")
