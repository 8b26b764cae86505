"""The start of a GPU's engine on a CPU, then a few requests: a line for each part.

Drafts as chains and trees, a union, native beams; see :mod:`tests.engine.gpu_start_on_cpu`. The
status is not zero if a part fails. Prints one JSON object at the end::

    python -m tests.engine.gpu_startup [ENGINE ...]
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

from vllm import LLM

from tests.engine import gpu_start_on_cpu as start
from tests.engine.beam.cases import request_of
from tests.engine.beam.oracle import Case
from tests.engine.compare import differences, generate, tell_oracle
from tests.engine.conftest import runner_of, scheduler_of, trees_of
from tests.engine.drafters import OracleDrafter
from tests.engine.gpu_device_check import refusals
from tests.engine.launches import launches, new_launches, record_launches
from tests.engine.v2_run import CHAINS, TEXTS, TREES, UNION, greedy, put_in
from vllm_trie.drafts.engine.runners.v2 import DraftedOnly
from vllm_trie.lab.tiny_model import model_path

FIXED = {"node_budget": "fixed"}
ENGINES: dict[str, dict[str, Any]] = {
    "chains": {"speculative_config": {**CHAINS, **FIXED}},
    "trees": {"speculative_config": {**TREES, **FIXED}},
    "union": {"speculative_config": {**UNION, "num_speculative_tokens": 4, **FIXED}},
    "broken chains": {"speculative_config": {**CHAINS, **FIXED}},
    "beams": {},
}
REQUESTS = [greedy(max_tokens=6 + i, **({} if i % 3 else {"seed": 1})) for i in range(4)]


def engine(**options: Any) -> LLM:
    settings = {"worker_cls": f"{start.__name__}.PlainStart"} if not options else {}
    return LLM(
        model=str(model_path()),
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 1},  # the interpreter takes its time
        dtype="float32",
        compilation_config={"mode": 0},
        kv_cache_memory_bytes=16 << 20,
        block_size=32,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        max_model_len=160,
        disable_log_stats=False,
        seed=0,
        **settings,
        **options,
    )


def run_drafts(name: str, plain: list[Any]) -> dict[str, Any]:
    """Start an engine that drafts; compare its output with the plain engine's."""
    llm = engine(**ENGINES[name])
    adapter = runner_of(llm).adapter
    assert adapter.is_drafting, trees_of(llm).guard.failures
    assert runner_of(llm).adaptive_verification is None
    put_in(llm, OracleDrafter)
    tell_oracle(plain)
    before = set(launches)
    replays, totals = start.Graph.replays, trees_of(llm).totals
    outputs = generate(llm, TEXTS[:4], REQUESTS)
    _kept.append(llm)
    assert differences(plain, outputs) == []
    assert start.Graph.replays > replays
    assert totals.tokens > totals.steps
    result: dict[str, Any] = {"replays": start.Graph.replays - replays}
    result["new launches"] = new_launches(before)
    if start.device_checks and name == "trees":
        (check,) = start.device_checks
        result |= {"checked_steps": check.num_steps, "largest_error": check.largest_error}
        result["refusals"] = refusals(runner_of(llm))
    return result


def run_broken(plain: list[Any]) -> dict[str, Any]:
    """Start an engine whose verification raises: it must serve, without drafts."""

    stock = DraftedOnly.__call__

    def fault(self: Any, *args: Any) -> Any:
        if self._adapter.is_drafting:
            raise RuntimeError("a fault of the plugin")
        return stock(self, *args)

    DraftedOnly.__call__ = fault
    try:
        llm = engine(**ENGINES["broken chains"])
    finally:
        DraftedOnly.__call__ = stock
    _kept.append(llm)
    assert not runner_of(llm).adapter.is_drafting
    assert differences(plain, generate(llm, TEXTS[:4], REQUESTS)) == []
    assert trees_of(llm).totals.steps == 0  # nothing has waited for tokens
    (counted,) = (
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:trie_draft_failures" and metric.labels["reason"] == "start_check"
    )
    assert counted == 1
    return {"counted": counted}


def run_beams(llm: LLM) -> dict[str, Any]:
    """A search on the plain engine; what it finds is compared in other tests."""
    text, params = request_of(Case(tuple(TEXTS[3]["prompt_token_ids"]), 2, False, 1.0, 5))
    replays = start.Graph.replays
    output = llm.generate(text, params, use_tqdm=False)[0]
    assert len(output.outputs) == 2
    counters = scheduler_of(llm).beam_counters
    assert (counters.groups, counters.groups_failed) == (1, 0)
    assert start.Graph.replays > replays
    return {"replays": start.Graph.replays - replays}


_kept: list[LLM] = []
"""An engine that is freed ends the process groups of the others."""


def main() -> int:
    v2_on_cpu.schedule_as_on_a_gpu()
    start.start_as_on_a_gpu()
    record_launches()
    v2_on_cpu.use_v2(True)
    results: dict[str, Any] = {}
    failed = 0
    print("plain", flush=True)
    llm = engine()
    _kept.append(llm)
    plain = generate(llm, TEXTS[:4], REQUESTS)
    for name in sys.argv[1:] or ENGINES:
        print(name, flush=True)
        try:
            if name == "beams":
                results[name] = run_beams(llm)
            elif name == "broken chains":
                results[name] = run_broken(plain)
            else:
                results[name] = run_drafts(name, plain)
            print(f"{name}: passed, {results[name]}", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
    print("RESULT " + json.dumps({**results, "launches": sorted(launches)}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
