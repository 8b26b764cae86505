"""Files of traces: who gets one, what is in it, and faults of the disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError

from tests.engine.beam.simulation import prepare_params
from tests.unit.drafters.support import make_context
from vllm_trie.drafts import VerifiedStep, get_drafter_class, parse_options
from vllm_trie.drafts.engine.config import AllOptions, TreeConfig
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.extras.traces import recorder as module
from vllm_trie.extras.traces.recorder import TraceRecorder
from vllm_trie.extras.traces.request import check_folder
from vllm_trie.extras.traces.trace_file import Step, read_trace
from vllm_trie.hooks.frontend.request_options import SpeculationRequestError, with_packed_options
from vllm_trie.hooks.wire import SEARCH_KEY, TreeStats
from vllm_trie.searches.engine.frontend.extra_args import check_extra_args
from vllm_trie.tree import TokenTree

TREE = TokenTree.from_lists([5, 6, 7], [-1, 0, -1], [0.9, 0.5, 0.1])
ACCEPTED = VerifiedStep(TREE, (0, 1), None)
NOTHING = VerifiedStep(TokenTree.empty(), (), None)


def asking(request_id: str, extra_args: Any = None, **params: Any) -> Any:
    extra = {"speculation_trace": True} if extra_args is None else extra_args
    return SimpleNamespace(
        req_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(extra_args=extra, **params),
    )


def recorder_of(folder: Path, method: str = "ngram_trie", **options: Any) -> TraceRecorder:
    parsed = parse_options(method, options)
    drafter = get_drafter_class(method)(parsed, make_context())
    tree_config = TreeConfig(method, None, parsed, AllOptions(trace_path=str(folder)))
    return TraceRecorder(folder, tree_config, drafter)


def record(recorder: TraceRecorder, results: dict[str, VerifiedStep], new_tokens: Any) -> None:
    trees = [result.tree for result in results.values()]
    accepted = [result.accepted for result in results.values()]
    recorder.ended(TreeStep([*results], trees, accepted=accepted), new_tokens, TreeStats())


@pytest.fixture
def recorder(tmp_path):
    return recorder_of(tmp_path)


def test_a_request_that_asks_gets_a_file(recorder, tmp_path):
    recorder.begun([asking("a"), asking("b", {}), asking("c", {"speculation_trace": 0})])
    record(recorder, {"a": NOTHING, "b": NOTHING}, [[4], [4]])
    recorder.begun([asking("a")])  # preempted: its text starts again, its trace goes on
    record(recorder, {"b": NOTHING, "a": ACCEPTED}, [[8], [5, 6, 9]])
    record(recorder, {"a": NOTHING}, [[]])
    for request_id in "abc":
        recorder.released(request_id)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace = read_trace(path)
    assert trace.end == "complete"
    assert (trace.header.request_id, trace.header.prompt) == ("a", [1, 2, 3])
    assert [step.tokens for step in trace.steps] == [[4], [5, 6, 9]]
    seconds = trace.steps[1].seconds
    assert trace.steps[1] == Step.of(TREE, (0, 1), (5, 6, 9), seconds)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"stop_token_ids": [6]}, [5, 6]),
        ({"stop_token_ids": [9]}, [5, 6, 9]),
    ],
)
def test_the_trace_ends_with_the_output(recorder, tmp_path, params, tokens):
    recorder.begun([asking("a", **params)])
    record(recorder, {"a": ACCEPTED}, [[5, 6, 9]])
    recorder.released("a")
    (path,) = tmp_path.iterdir()
    assert [step.tokens for step in read_trace(path).steps] == [tokens]


def test_steps_say_why_there_is_no_draft_and_who_drafted(recorder, tmp_path):
    recorder.begun([asking("a")])
    empty = TokenTree.empty()
    recorder.drafted(["a"], {}, lambda _: False)  # while its prefill goes on
    expected = ["prefill"]
    record(recorder, {"a": NOTHING}, [[4]])
    for drafts, has_failed, result, reason in (
        ({"a": (TREE, TREE)}, False, ACCEPTED, ""),
        ({"a": (TREE, TREE)}, False, NOTHING, "dropped"),
        ({"a": (empty, empty)}, False, NOTHING, "unknown"),
        ({"a": (empty, empty)}, True, NOTHING, "failed"),
        ({"a": (TREE, empty)}, False, NOTHING, "budget"),
        ({}, False, NOTHING, "limit"),
        (None, False, NOTHING, "pause"),
    ):
        if drafts is not None:
            recorder.drafted(["a", "b"], drafts, lambda _, failed=has_failed: failed)
        record(recorder, {"a": result}, [[5, 6, 9]])
        expected.append(reason)
    recorder.released("a")
    (path,) = tmp_path.iterdir()
    steps = read_trace(path).steps
    assert [step.no_draft for step in steps] == expected


def test_the_header_has_the_options(tmp_path):
    recorder = recorder_of(tmp_path, recycle=False)
    recorder.begun([asking("a")])
    (path,) = tmp_path.iterdir()
    header = read_trace(path).header
    assert header.options["recycle"] is False
    assert header.options["num_speculative_tokens"] == make_context().num_nodes
    assert "trace_path" not in header.options
    assert header.created is not None


def test_request_ids_are_no_paths(recorder, tmp_path):
    ids = ["../../etc/passwd", "/etc/x", "a\0b\n", "é" * 300, ".", ""]
    recorder.begun([asking(request_id) for request_id in ids])
    for request_id in ids:
        recorder.released(request_id)
    paths = list(tmp_path.iterdir())
    assert len(paths) == len(ids)
    assert {read_trace(path).header.request_id for path in paths} == set(ids)


def test_existing_files_stay(recorder, tmp_path):
    target, link = tmp_path / "target", tmp_path / "a.trace.jsonl"
    target.write_text("kept")
    link.symlink_to(target)
    recorder.begun([asking("a")])
    record(recorder, {"a": NOTHING}, [[4]])
    recorder.released("a")
    assert target.read_text() == "kept"


def test_the_folder_is_bounded(recorder, tmp_path, monkeypatch):
    """One warning, and a look at the folder once a minute."""
    now, looks, warnings = 100.0, 0, []
    scandir = os.scandir

    def counted(folder: Path) -> Any:
        nonlocal looks
        looks += 1
        return scandir(folder)

    monkeypatch.setattr(module, "MAX_FILES", 2)
    monkeypatch.setattr(module.os, "scandir", counted)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(module.logger, "warning", lambda *said: warnings.append(said))
    for begun in ("abc", "d", "e"):
        recorder.begun([asking(request_id) for request_id in begun])
    assert (sorted(recorder._followed), looks, len(warnings)) == (["a", "b"], 1, 1)
    now += 61
    recorder.begun([asking("f")])
    assert (len(recorder._followed), looks, len(warnings)) == (2, 2, 1)
    recorder.released("a")
    next(tmp_path.glob("a*")).unlink()
    now += 61
    for request_id in "gh":
        recorder.begun([asking(request_id)])
    assert (sorted(recorder._followed), len(warnings)) == (["b", "g"], 2)


def test_a_disk_that_fills_up_ends_the_trace_only(recorder, tmp_path, monkeypatch):
    recorder.begun([asking("a")])
    record(recorder, {"a": ACCEPTED}, [[5, 6, 9]])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._followed["a"].file.fileno())
    record(recorder, {"a": ACCEPTED}, [[5, 6, 9]])
    os.close(full)
    record(recorder, {"a": ACCEPTED}, [[5, 6, 9]])
    recorder.released("a")
    assert not recorder._followed
    (path,) = tmp_path.iterdir()
    trace = read_trace(path)  # of a process that was killed just as well
    assert (len(trace.steps), trace.end) == (1, "missing")


def test_a_step_that_makes_no_sense_ends_the_trace_only(recorder, tmp_path):
    recorder.begun([asking("a")])
    record(recorder, {"a": VerifiedStep(TREE, (2, 1), None)}, [[5, 6, 9]])
    record(recorder, {"a": ACCEPTED}, [[5, 6, 9]])
    recorder.released("a")
    (path,) = tmp_path.iterdir()
    assert read_trace(path)[1:] == ([], "missing")


def config(trace_path: str | None) -> Any:
    options = {"method": "ngram_trie", "trace_path": trace_path}
    speculative = SimpleNamespace(model="vllm_trie.drafts.engine.runners.v1.V1Speculation")
    return SimpleNamespace(speculative_config=speculative, additional_config={"vllm_trie": options})


@pytest.mark.parametrize(
    ("extra", "engine", "said"),
    [
        ({"speculation_trace": "yes"}, config("folder"), "must be true or false"),
        ({"speculation_trace": True}, config(None), "this engine writes none"),
        ({"speculation_trace": True}, SimpleNamespace(speculative_config=None), "writes none"),
    ],
)
def test_traces_that_nobody_writes_are_refused(extra, engine, said):
    with pytest.raises(SpeculationRequestError, match=said):
        with_packed_options(engine, SimpleNamespace(extra_args=extra), None)


def test_a_misspelled_option_is_refused():
    engine: Any = SimpleNamespace(kv_transfer_config=None)
    params = SimpleNamespace(extra_args={"speculation_trase": True})
    with pytest.raises(VLLMClientError, match="did you mean 'speculation_trace'"):
        check_extra_args(engine, params, [])


@pytest.mark.parametrize("asks", [True, False])
def test_beam_searches_have_no_trace(asks):
    options = {"beam_width": 2, "speculation_trace": asks}
    params = prepare_params(SamplingParams(extra_args=options))
    if asks:
        with pytest.raises(SpeculationRequestError, match="for requests with drafts, and a search"):
            with_packed_options(config("folder"), params, None)
    else:
        params = with_packed_options(config(None), params, None)
        assert params.extra_args.keys() == {SEARCH_KEY}


def test_the_folder_must_exist(tmp_path):
    check_folder(config(None))
    check_folder(config(str(tmp_path)))
    (tmp_path / "file").touch()
    for wrong in ("missing", "file"):
        with pytest.raises(ValueError, match=r"trace_path=.* must be a folder that exists"):
            check_folder(config(str(tmp_path / wrong)))
