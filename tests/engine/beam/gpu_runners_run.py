"""Beam search on the classes that run it on a GPU, on a CPU, with random load and aborts.

A program of its own, as TRITON_INTERPRET=1 must be set before Triton is imported::

    python -m tests.engine.beam.gpu_runners_run v2 --asynchronous --num-blocks 9

``v2`` is Model Runner V2, vLLM's default on GPUs: the class is the GPU's own, its Triton kernels
run in Triton's interpreter. ``v1`` is Model Runner V1 with its buffers on the host and on the
device apart, as on a GPU. Asynchronous scheduling has stand-ins for streams and events. Attention
is the CPU's. Prints one JSON object.
"""

# What is set up here must stand before the imports that it is for.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("runner", choices=["v1", "v2"])
parser.add_argument("--asynchronous", action="store_true")
parser.add_argument("--num-blocks", type=int)
parser.add_argument("--no-prefix-caching", action="store_true")
parser.add_argument("--overcommit", action="store_true")
parser.add_argument("--searches", type=int, default=8)
parser.add_argument("--verification", choices=["chain", "tree"], help="beside ngram_trie's drafts")
parser.add_argument("--constrained", action="store_true", help="rules and a catalogue, instead")
arguments = parser.parse_args()

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(arguments.runner == "v2"))

from tests.engine import v2_on_cpu  # prepares Triton's interpreter
from tests.engine.beam.async_on_cpu import force_async_scheduling

if arguments.asynchronous:
    force_async_scheduling()

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu import model_runner as gpu_model_runner_v2

from tests.engine.beam import test_token_rules as token_rules
from tests.engine.beam.cases import check_case, greedy_requests, prompt, request_of
from tests.engine.beam.oracle import Case, constrained_search
from tests.engine.conftest import free_blocks, scheduler_of
from tests.engine.v2_waits import Waits
from tests.unit.items.catalogues import PlainTrie, random_items, write
from vllm_trie.tiny_model import model_path
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup


def random_case(rng: random.Random, number: int) -> Case:
    return Case(
        prompt(number, rng.randint(5, 60)),
        rng.choice([1, 2, 3, 5, 7]),
        rng.choice([True, False, "never"]),
        rng.choice([0.0, 0.6, 1.0]),
        rng.randint(1, 16),
    )


def run(llm: LLM, rng: random.Random) -> dict[str, Any]:
    """Searches and ordinary requests come at random times, some searches are aborted."""
    cases = {f"case {i}": random_case(rng, i) for i in range(arguments.searches)}
    victims = {f"victim {i}": random_case(rng, 30 + i) for i in range(3)}
    greedy = {f"greedy {i}": each for i, each in enumerate(greedy_requests(3, max_tokens=12))}
    alone = {
        name: llm.generate([text], params, use_tqdm=False)[0].outputs[0].token_ids
        for name, (text, params) in greedy.items()
    }
    requests = {name: request_of(case) for name, case in (cases | victims).items()} | greedy
    for _, params in requests.values():
        params.output_kind = RequestOutputKind.FINAL_ONLY
    names = list(requests)
    rng.shuffle(names)
    engine = llm.llm_engine
    finished: dict[str, Any] = {}

    def step() -> None:
        finished.update((result.request_id, result) for result in engine.step())

    for name in names:
        engine.add_request(name, *requests[name])
        for _ in range(rng.choice([0, 1, 3])):
            step()
        if name in victims:
            engine.abort_request([name])
    while engine.has_unfinished_requests():
        step()
    assert all(finished[name].outputs[0].token_ids == alone[name] for name in greedy)
    path = str(model_path())
    return {"compared": sum(check_case(path, cases[name], finished[name]) for name in cases)}


ITEMS = random_items(3, 300, 0, (4, 4), branching=40)


def run_constrained(llm: LLM) -> dict[str, Any]:
    """Biases, masks, grammars and a catalogue next to ordinary requests."""
    wanted = dict(list(enumerate(token_rules.WANTED))[::2])
    requests = [token_rules.request_of(number, each) for number, each in wanted.items()]
    expected = [token_rules.expected(number) for number in wanted]
    items = PlainTrie(ITEMS)
    for width, end in ((7, "complete"), (5, "eos")):
        eos = 0 if end == "eos" else None
        token_ids = prompt(width, 30)
        options = {"beam_width": width, "items": "shop", "items_end": end}
        params = SamplingParams(n=width, temperature=0.0, max_tokens=6, extra_args=options)
        requests.append(({"prompt_token_ids": list(token_ids)}, params))
        longest = 4 + (eos is not None)
        allowed = functools.partial(items.allowed, eos=eos)
        expected.append(constrained_search(
            str(model_path()), token_ids, width, longest, lambda path, a=allowed: a(path), eos
        ))  # fmt: skip
    greedy = greedy_requests(3, max_tokens=12)
    alone = [llm.generate([text], params, use_tqdm=False)[0] for text, params in greedy]
    requests += greedy
    results = llm.generate(
        [text for text, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    for result, before in zip(results[len(expected) :], alone, strict=True):
        assert result.outputs[0].token_ids == before.outputs[0].token_ids
    for number, (result, hypotheses) in enumerate(zip(results, expected, strict=False)):
        outputs = result.outputs[: len(hypotheses)]
        found = [list(each.token_ids) for each in outputs]
        assert found == [each.token_ids for each in hypotheses], (number, found, hypotheses)
        for output, hypothesis in zip(outputs, hypotheses, strict=True):
            assert abs(output.score - hypothesis.score) < 1e-4
    with pytest.raises(ValueError, match="'beam_width' is not supported with Model Runner V2"):
        llm.generate([requests[0][0]], SamplingParams(extra_args={"items": "shop"}), use_tqdm=False)
    return {"compared": sum(map(len, expected))}


def main() -> None:
    if arguments.runner == "v1":
        # The CPU's runner makes one buffer of each pair; on a GPU they stay two.
        CPUModelRunner._postprocess_tensors = lambda self: None
    if arguments.overcommit:
        # Groups are admitted whatever runs, and fight for blocks.
        for name in ("expected_blocks", "min_blocks"):
            setattr(BeamGroup, name, property(lambda self: 0, lambda self, value: None))
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    catalogues = {"shop": str(write(folder / "items", ITEMS))} if arguments.constrained else {}
    drafts = {
        "method": "ngram_trie",
        "num_speculative_tokens": 4,
        "verification": arguments.verification,
    }
    llm = LLM(
        speculative_config=drafts if arguments.verification else None,
        model=str(model_path()),
        additional_config={"vllm_trie": {"items": catalogues}},
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=arguments.num_blocks,
        block_size=32,
        max_model_len=160,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        enable_prefix_caching=not arguments.no_prefix_caching,
        disable_log_stats=False,
        seed=0,
    )
    scheduler = scheduler_of(llm)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    expected = {"v1": gpu_model_runner, "v2": gpu_model_runner_v2}[arguments.runner]
    assert isinstance(runner, expected.GPUModelRunner)
    assert type(scheduler).__name__.startswith("Async") == arguments.asynchronous
    waits = None
    if arguments.runner == "v2" and arguments.asynchronous:
        torch.Event = torch.cuda.Event = v2_on_cpu.Event  # which counts who waits
        waits = Waits(llm)
    before = free_blocks(llm)
    rng = random.Random(arguments.searches)
    result = run_constrained(llm) if arguments.constrained else run(llm, rng)
    for _ in range(3):  # let the worker hear of the last ones
        if scheduler.has_requests():
            llm.llm_engine.step()
    result["blocks_lost"] = before - free_blocks(llm)
    result["requests_left"] = len(scheduler.requests) + len(runner_requests(runner))
    if waits is not None:
        result["waits"] = waits.summary()
    counters = scheduler.beam_counters
    result |= {name: getattr(counters, name) for name in type(counters).__slots__}
    print("RESULT " + json.dumps(result))


def runner_requests(runner: Any) -> Any:
    """What the worker still knows."""
    return runner.requests if arguments.runner == "v1" else runner.req_states.req_id_to_index


if __name__ == "__main__":
    main()
