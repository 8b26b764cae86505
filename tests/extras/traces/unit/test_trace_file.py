"""Traces: what is written is read again, within bounds; what is no trace is refused."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.extras.traces import trace_file as trace
from vllm_trie.extras.traces.trace_file import (
    MAX_BYTES,
    MAX_PROMPT,
    Header,
    Step,
    Trace,
    TraceWriter,
    parse_trace,
    read_trace,
)
from vllm_trie.tree import TokenTree, accept_greedy

TREE = TokenTree.from_lists([5, 6, 7, 8], [-1, 0, -1, 1], [0.9, 0.41234, 0.05, 0.1])
HEADER = Header.of("request", "ngram_trie", "model", "tokenizer", [1, 2, 3])
STEP = Step.of(TREE, (0, 1), (5, 6, 9), 0.0123456789)


def written(*steps: Step, **bounds: int) -> bytes:
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        for name, bound in bounds.items():
            patch.setattr(trace, name.upper(), bound)
        writer = TraceWriter(file, HEADER)
    for step in steps:
        writer.add(step)
    writer.finish()
    return file.getvalue()


def read(content: bytes) -> Trace:
    return parse_trace(content.splitlines(keepends=True), "file")


@st.composite
def any_steps(draw: st.DrawFn) -> Step:
    count = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    tokens = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    target = draw(st.lists(st.integers(0, 99), min_size=count + 1, max_size=count + 1))
    accepted = accept_greedy(tokens, parents, target)
    never = np.zeros(count, bool)
    tree = TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32), None, never)
    new = [*(tokens[node] for node in accepted), draw(st.integers(0, 99))]
    cut = draw(st.integers(1, len(new)))
    return Step.of(tree, accepted, new[:cut], draw(st.floats(0, 10)))


@given(st.lists(any_steps(), max_size=5))
def test_what_is_written_is_read(steps):
    assert read(written(*steps)) == Trace(HEADER, steps, "complete")


def test_tokens_that_end_inside_the_path():
    assert Step.of(TREE, (0, 1, 3), (5, 6), 0.0).accepted == [0, 1]


def test_the_end_of_a_long_prompt_is_kept():
    header = Header.of("", "plain", "m", "t", range(MAX_PROMPT + 5))
    assert header.prompt == list(range(5, MAX_PROMPT + 5))
    assert header.num_prompt_tokens == MAX_PROMPT + 5


def test_bounds_cut_the_trace_and_say_so():
    assert read(written(STEP, STEP, STEP, max_steps=2)) == Trace(HEADER, [STEP, STEP], "steps")
    full = written(STEP, STEP)
    assert read(full).end == "complete"
    assert written(STEP, STEP, max_bytes=len(full)) == full
    small, short = written(STEP, STEP, max_bytes=len(full) - 1), Step.of(TREE, (), (9,), 0.0)
    assert read(small) == Trace(HEADER, [STEP], "bytes")
    assert len(small) < len(full)
    # A shorter step after the first that did not fit would leave a gap.
    assert len(read(written(STEP, STEP, short, max_bytes=len(full) - 1)).steps) == 1


@pytest.mark.parametrize("kept", [1, 20, 60])
def test_a_file_that_was_being_written_is_truncated(kept, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(written(STEP, STEP)[:-kept])
    trace = read_trace(path)
    assert trace.end == "missing"
    assert trace.steps == [STEP] * len(trace.steps)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parents": [-1, 1, -1, 1]}, "parent"),
        ({"parents": [-1, 0, -1]}, "differ in length"),
        ({"probabilities": [0.1]}, "differ in length"),
        ({"accepted": [0, 9]}, "does not exist"),
        ({"never_accept": [-1]}, "does not exist"),
        ({"accepted": [0, 2]}, "no path"),
        ({"accepted": [1]}, "no path"),
        ({"tokens": [5, 7]}, "not those of the accepted"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"seconds": -1}, "seconds"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_steps_are_refused(change, said):
    line = json.dumps({**json.loads(STEP.encoded()), **change}).encode() + b"\n"
    with pytest.raises(ValueError, match=rf"file, line 2, is no line of a trace: .*{said}"):
        read(HEADER.encoded() + line)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"not JSON\n", "line 1"),
        (STEP.encoded(), "line 1"),
        (HEADER.encoded().replace(b'"version":1', b'"version":2'), "version"),
        (written(STEP) + STEP.encoded(), "follows the end"),
        (b"\xff\xfe\n", "line 1"),
    ],
)
def test_other_files_are_refused(content, said, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_trace(path)


def test_huge_files_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(HEADER.encoded() + b" " * MAX_BYTES)
    with pytest.raises(ValueError, match="larger than a trace"):
        read_trace(path)
