"""The page in a real browser: keys, pointer, views, length, hostile text."""

from __future__ import annotations

import pytest

from tests.unit.lab.explore.browser import CHROMIUM, Tab, chromium, wait
from tests.unit.lab.explore.samples import WORDS, decode, generation, search
from vllm_trie.lab.explore.page import page

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: `make test` installs it as root, with apt-get"
)
TRACES = [generation("plain", 90, 0), generation("ngram_trie", 90, 2, 1)]
LONG = generation("trie_union", 1800, 0.9, 2)
STEPS = TRACES[1].steps


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    contents = {
        "short": page(TRACES, decode, search(24)),
        "long": page([LONG._replace(end="steps")], decode, search(300, 8)),
        "beams": page([], decode, search(5, 2)),
        "empty": page([TRACES[0]._replace(steps=[], end="missing")], decode),
    }
    for name, content in contents.items():
        (folder / f"{name}.html").write_text(content, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in contents}


@pytest.fixture(scope="module")
def browser():
    with chromium() as tab:
        yield tab


@pytest.fixture
def show(browser, pages):
    """Open a page; after the test, check that nothing failed and nothing was fetched."""
    browser.problems.clear()
    browser.requests.clear()
    yield lambda name: browser.open(pages[name]) or browser
    browser.run("0")  # takes in the events so far
    assert browser.problems == []
    addresses = {path.as_uri() for path in pages.values()}
    assert {address.partition("#")[0] for address in browser.requests} <= addresses
    assert browser.run("window.pwned") is None


def place(tab: Tab) -> int:
    """The number of the step that the page says it shows; all its parts show the same."""
    number = int(tab.text("#place b"))
    assert int(tab.run("document.getElementById('slider').value")) == number - 1
    if not tab.run("document.getElementById('runs-view').hidden"):
        marked = tab.run("[...document.querySelectorAll('#text .now')].map(e => e.dataset.step)")
        assert marked == [str(number - 1)]
        assert tab.text("#trees section .facts").startswith(f"step {number} ·")
    return number


def test_keys_and_pointer(show):
    tab = show("short")
    last = len(STEPS)
    for keys, expected in (
        (("1", "Home", "j", "j"), 3), ("k", 2), (["ArrowRight"], 3), (["ArrowLeft"] * 9, 1),
        (("2", "End"), last), ("j", last), (["Home"], 1),
    ):  # fmt: skip
        tab.press(*keys)
        assert place(tab) == expected
    tab.press(" ")
    wait(lambda: int(tab.text("#place b")) >= 3, "step is played")
    tab.press(" ", "Home")
    for selector, expected in (('[aria-label="Next step"]', 2), ("#text [data-step='4']", 5)):
        tab.click(selector)
        assert place(tab) == expected
    tab.click(".lane:nth-of-type(2) .track")  # the step of this token
    tokens = [sum(len(step.tokens) for step in STEPS[:n]) for n in range(last + 1)]
    assert tokens[place(tab) - 1] <= 45 <= tokens[place(tab)]
    tab.click("#tab-beams")
    assert place(tab) == 1


def test_the_text_and_the_trees_are_those_of_the_trace(show):
    tab = show("short")
    # It opens on the step with most accepted nodes, and jumps between it and the slowest.
    index = max(range(len(STEPS)), key=lambda number: len(STEPS[number].accepted))
    step, tree = STEPS[index], "#trees section.active "
    assert (place(tab), tab.text(".lane[aria-pressed=true] b")) == (index + 1, "ngram_trie")
    shown = tab.run("[...document.querySelectorAll('#text span')].map(e => e.textContent)")
    assert shown == [readable(decode(step.tokens)) for step in STEPS]
    assert tab.count(f"{tree} g.node tspan") == len(step.nodes) + 1
    assert tab.count(f"{tree} g.node.taken tspan") == len(step.accepted) > 2
    assert tab.count(f"{tree} .taken li.accepted") == len(step.accepted)
    assert tab.count(f"{tree} g.node.bonus tspan") == 1
    assert tab.count(f"{tree} .share") == tab.count(f"{tree} g.node") - 1
    tab.press("s")
    slowest = max(STEPS[1:], key=lambda step: step.seconds / len(step.tokens))
    assert place(tab) == STEPS.index(slowest) + 1
    tab.press("Home")
    assert "computed the prompt" in tab.text(f"{tree} .empty")
    undrafted = [step.no_draft for step in STEPS].index("budget")
    tab.click(f"#text [data-step='{undrafted}']")
    assert "worth its time" in tab.text(f"{tree} .empty")


def test_a_thousand_steps(show):
    tab = show("long")
    assert "truncated" in tab.text(".notice")
    tab.press("End")
    assert place(tab) == len(LONG.steps) > 900
    assert tab.run("document.querySelector('#chart .scroll').scrollLeft") > 900
    assert tab.count("*") < len(LONG.steps) + 400  # not all trees are in the document
    tab.press("b", "End")
    assert place(tab) == search(300, 8).search.steps > 200


def test_beams(show):
    tab, trace = show("beams"), search(5, 2).search
    assert tab.run("document.getElementById('views').hidden")
    for kind in ("kept", "finished"):
        assert tab.count(f"#search g.{kind}") == trace.fates.count(kind), kind
    assert tab.count(".hypothesis") == len(trace.returned)
    # The prompt's three full blocks are shared; each row has a tail of its own.
    tab.press("j", "j")
    assert (tab.count("#blocks td.shared"), tab.count("#blocks td.tail")) == (2, 2)
    assert tab.text("#blocks-title") == "5 KV blocks of 16 tokens in use, 8 without sharing"


def readable(text: str) -> str:
    """The text as the page shows it: characters that reorder or break lines are written out."""
    return text.replace("\u202e", "\\u{202e}").replace("\u2028", "\\u{2028}")


def test_hostile_text_is_shown(show):
    tab = show("short")
    tab.press("1")
    assert tab.text("#title") == "<b>sample"
    assert [tab.count(s) for s in ("script", "img", "h1 b, #text *:not(span)")] == [2, 0, 0]
    text = tab.text("#text")
    assert text == readable(decode([t for step in TRACES[0].steps for t in step.tokens]))
    assert WORDS[21] in text
    # A label that is the name of a property of every object.
    assert tab.run("data.labels[26]") == "constructor"
    # Even a script that found its way in would not run.
    tab.run("document.body.append(Object.assign(document.createElement('script'),"
            "{textContent: 'window.pwned = 1'}))")  # fmt: skip
    assert all("Content Security Policy" in problem for problem in tab.problems)
    tab.problems.clear()


def test_a_trace_without_steps(show):
    tab = show("empty")
    tab.press("j", "End", " ", "2", "b", "t")
    assert "truncated" in tab.text(".notice")
