"""Traces of a real engine: of requests that ask for one, and of an offline run."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.compare import generate, speculation
from tests.engine.prompts import prompts
from vllm_trie.extras.traces.recorder import TraceRecorder
from vllm_trie.extras.traces.trace_file import Trace, read_trace
from vllm_trie.lab.explore.record import record, record_beams
from vllm_trie.lab.local_engine import verifier_of


def recording(verification: str, folder: Path) -> dict[str, Any]:
    """Options of an engine that writes traces."""
    return speculation("ngram_trie", 16, verification=verification, trace_path=str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The one folder of the file's engines."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(autouse=True)
def _empty(folder):
    yield
    shutil.rmtree(folder)
    folder.mkdir()


def greedy(trace: bool = True, **options: Any) -> SamplingParams:
    extra = {"speculation_trace": True} if trace else {}
    return SamplingParams(temperature=0.0, max_tokens=60, extra_args=extra, **options)


def traces(llm: Any, folder: Path) -> list[Trace]:
    """Those of the folder; reading one checks that accepted nodes are paths of its trees.

    In one process, vLLM tells the worker of the last requests' end with the next request.
    """
    generate(llm, prompts(1), SamplingParams(max_tokens=1))
    return [read_trace(path) for path in sorted(folder.iterdir())]


def output(trace: Trace) -> list[int]:
    return list(itertools.chain.from_iterable(step.tokens for step in trace.steps))


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_traces_are_the_outputs(engine, folder, verification):
    llm = engine(**recording(verification, folder))
    some = prompts(6)
    sampled = SamplingParams(temperature=0.8, max_tokens=40, extra_args={"speculation_trace": 1})
    stopped = greedy(stop_token_ids=list(range(200, 260)))
    params = [greedy(), greedy(False), stopped, greedy(), greedy(False), sampled]
    outputs = [list(result.outputs[0].token_ids) for result in generate(llm, some, params)]
    recorded = traces(llm, folder)
    assert sorted(map(output, recorded)) == sorted(outputs[index] for index in (0, 2, 3, 5))
    assert {trace.end for trace in recorded} == {"complete"}
    steps = [step for trace in recorded for step in trace.steps]
    assert sum(len(step.accepted) for step in steps) > 10
    assert all(len(step.probabilities) == len(step.nodes) <= 16 for step in steps)
    branched = [step for step in steps if step.parents != list(range(-1, len(step.nodes) - 1))]
    assert bool(branched) == (verification == "tree")
    (recorder,) = (of for of in verifier_of(llm).observers if isinstance(of, TraceRecorder))
    assert not recorder._followed


def test_offline_runs_are_traces(engine, folder):
    (prompt,) = prompts(1)
    tokens = list(prompt["prompt_token_ids"])
    (expected,) = generate(engine(), [prompt], greedy(False))
    for llm, method in ((engine(), "plain"), (engine(**recording("tree", folder)), "ngram_trie")):
        trace = record(llm, method, tokens, greedy(False), folder)
        assert output(trace) == list(expected.outputs[0].token_ids)
        assert (trace.header.method, trace.header.prompt, trace.end) == (method, tokens, "complete")
        assert not list(folder.iterdir())
    steps = trace.steps
    assert steps[0].no_draft == "prefill"
    assert all(step.no_draft for step in steps if not step.nodes)


def test_a_beam_search_is_recorded(engine):
    (prompt,) = prompts(1)
    recorded = record_beams(engine(), 3, prompt["prompt_token_ids"], 12)
    assert recorded.search.beam_width == 3
    assert len(recorded.search.returned) == 3
    assert recorded.num_prompt_tokens == len(prompt["prompt_token_ids"])
