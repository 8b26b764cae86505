"""Beam search on the classes that run it on a GPU, on a CPU, with random load and aborts.

A program of its own, see :mod:`tests.engine.v2_on_cpu`. Prints one JSON object by name of the
`CASES` that it runs, by default all::

    python -m tests.engine.beam.gpu_runners_run [CASE ...]

Model Runner V2 is vLLM's default on GPUs: the class is the GPU's own, its Triton kernels run in
Triton's interpreter. Asynchronous scheduling has stand-ins for streams and events. Attention is the
CPU's.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.beam import test_token_rules as token_rules
from tests.engine.beam.cases import greedy_requests, prompt, run_with_aborts
from tests.engine.beam.oracle import constrained_search
from tests.engine.compare import step_to_the_end
from tests.engine.conftest import free_blocks
from tests.engine.v2_waits import Waits
from tests.extras.items.unit.catalogues import PlainTrie, random_items, write
from vllm_trie.extras.device_checks import search_check
from vllm_trie.lab.local_engine import runner_of, scheduler_of
from vllm_trie.lab.tiny_model import model_path
from vllm_trie.searches.engine.scheduler.admission import Admission
from vllm_trie.searches.engine.scheduler.group import BeamGroup
from vllm_trie.searches.engine.worker.device_copies import BlockCopier


class Load(NamedTuple):
    """What one engine is, and does.

    Attributes:
        engine: Options of the engine.
        overcommits: Whether groups are admitted whatever runs, and fight for blocks.
        is_constrained: Whether searches have rules and a catalogue, instead of a random load.
        searches: Their number.
    """

    engine: dict[str, Any]
    overcommits: bool = False
    is_constrained: bool = False
    searches: int = 8


# The interpreter's times say nothing of what a node is worth.
CHAINS = {"method": "ngram_trie", "num_speculative_tokens": 4, "node_budget": "fixed"}
TREES = {**CHAINS, "verification": "tree"}
CASES = {
    "rules and catalogues": Load({}, is_constrained=True),
    "no prefix caching, synchronous": Load(
        {"enable_prefix_caching": False, "async_scheduling": False}
    ),
    "beside chains": Load(
        {"num_gpu_blocks_override": 9, "speculative_config": CHAINS}, overcommits=True, searches=10
    ),
    "beside trees": Load(
        {"num_gpu_blocks_override": 12, "speculative_config": TREES}, overcommits=True
    ),
}


ITEMS = random_items(3, 300, 0, (4, 4), branching=40)


def run_constrained(llm: LLM) -> dict[str, Any]:
    """Biases, masks, grammars and a catalogue next to ordinary requests."""
    rules = dict(list(enumerate(token_rules.RULES))[::2])
    requests = [token_rules.request_of(number, rule) for number, rule in rules.items()]
    expected = [token_rules.expected(number) for number in rules]
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
        tokens = [list(output.token_ids) for output in outputs]
        assert tokens == [one.token_ids for one in hypotheses], (number, tokens, hypotheses)
        for output, hypothesis in zip(outputs, hypotheses, strict=True):
            assert abs(output.score - hypothesis.score) < 1e-4
    return {"compared": sum(map(len, expected))}


def passes_at_start(llm: LLM) -> tuple[str | None, bool]:
    """What the check at a start says, and whether the device began steps."""
    core, counters = llm.llm_engine.engine_core.engine_core, scheduler_of(llm).beam_counters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_check, "_WIDTHS", (3,))  # the interpreter is slow
        patch.setattr(search_check, "_NUM_ORDINARY", 1)
        return search_check.reason_against_searches(core), counters.steps_ahead > 20


def check_at_start(llm: LLM) -> tuple[str | None, bool, str | None, str | None]:
    """The same, and what the check says to a device that copies no tails, and to one that
    raises."""

    def fault(*arguments: Any) -> None:
        raise RuntimeError("a fault of the device")

    passed = passes_at_start(llm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockCopier, "copy", lambda *arguments: None)
        without_copies, _ = passes_at_start(llm)
        patch.setattr(BlockCopier, "copy", fault)
        return *passed, without_copies, passes_at_start(llm)[0]


def check_copies() -> None:
    """Copies of blocks in caches of several layouts, against torch's."""
    whole = torch.arange(12 * 2 * 3 * 4 * 6).view(12, 2, 3, 4, 6).float()
    layouts = [
        whole[:, 0],
        whole.permute(0, 3, 1, 2, 4),
        whole.transpose(0, 1).contiguous().transpose(0, 1),  # a half of each block behind all
        whole[..., :4],
        whole.view(6, 2, -1)[:, 1].bfloat16(),
    ]
    caches = [layout.clone(memory_format=torch.preserve_format) for layout in layouts]
    caches[3] = torch.empty_like(whole).copy_(whole)[..., :4]
    expected = [cache.clone().unflatten(0, (6, -1)) for cache in caches]
    sources, targets = torch.tensor([[1, 3, 3, 4], [1, 0, 5, 2]])
    for cache in expected:
        cache[targets] = cache[sources]
    BlockCopier([*caches, caches[0], caches[1][:, :1]], 6).copy(torch.stack([sources, targets]))
    for cache, copied in zip(caches, expected, strict=True):
        assert torch.equal(cache, copied.flatten(0, 1))


@contextmanager
def overcommitment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "expected_blocks", lambda self, group: 0)
        nothing = property(lambda self: 0, lambda self, value: None)
        patch.setattr(BeamGroup, "min_blocks", nothing, raising=False)
        yield


def run_load(load: Load, catalogue: str) -> dict[str, Any]:
    """Start an engine, give it a load, and look at what it leaves behind."""
    v2_on_cpu.use_v2(True)
    llm = LLM(
        **{
            "model": str(model_path()),
            "additional_config": {
                "vllm_trie": {"items": {"shop": catalogue} if load.is_constrained else {}}
            },
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
            "max_model_len": 160,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "disable_log_stats": False,
            "seed": 0,
            **load.engine,
        }
    )
    _kept.append(llm)
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    assert isinstance(runner, GPUModelRunner)
    is_async = type(scheduler).__name__.startswith("Async")
    assert is_async == load.engine.get("async_scheduling", True)
    waits = Waits(llm) if is_async else None
    before = free_blocks(llm)
    if load.is_constrained:
        result = run_constrained(llm)
    else:
        greedy = greedy_requests(3, max_tokens=12)
        compared = run_with_aborts(llm, str(model_path()), load.searches, greedy)
        result = {"compared": compared}
    step_to_the_end(llm)
    if waits is not None:
        result["waits"] = waits.summary()
    if load.is_constrained:
        result["start"] = check_at_start(llm)
    result["blocks_lost"] = before - free_blocks(llm)
    of_worker = runner.req_states.req_id_to_index
    result["requests_left"] = len(scheduler.requests) + len(of_worker)
    counters = scheduler.beam_counters
    return result | {name: getattr(counters, name) for name in type(counters).__slots__}


_kept: list[LLM] = []
"""An engine that is freed ends the process groups of the others."""


def main() -> None:
    v2_on_cpu.schedule_as_on_a_gpu()
    check_copies()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        catalogue = str(write(Path(folder) / "items", ITEMS))
        for name in sys.argv[1:] or CASES:
            load = CASES[name]
            with overcommitment() if load.overcommits else nullcontext():
                results[name] = run_load(load, catalogue)
            print(name, results[name], flush=True)
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
