"""The start of a GPU's engine on a CPU, then a few requests, a search among them.

See :mod:`tests.engine.gpu_start_on_cpu`. Each engine's drafts are compared with its own output
without them. Prints one JSON object::

    python -m tests.engine.gpu_startup [ENGINE ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

from vllm import LLM

from tests.engine import gpu_start_on_cpu as start
from tests.engine.beam.cases import request_of
from tests.engine.beam.gpu_runners_run import passes_at_start
from tests.engine.beam.oracle import Case
from tests.engine.compare import differences, generate, tell_oracle
from tests.engine.drafters import OracleDrafter
from tests.engine.gpu_device_check import refusals
from tests.engine.launches import launches, new_launches, record_launches
from tests.engine.v2_run import CHAINS, OPT_OUT, TEXTS, TREES, UNION, greedy
from tests.engine.v2_trees import put_in
from vllm_trie.drafts.engine.runners import v2_trees
from vllm_trie.extras.memory import warm_start
from vllm_trie.lab.local_engine import runner_of, scheduler_of, verifier_of

FIXED = {"node_budget": "fixed"}
BROKEN = "broken trees"
ENGINES: dict[str, dict[str, Any]] = {
    "union": {**UNION, "num_speculative_tokens": 4, **FIXED},
    "trees": {**TREES, **FIXED},
    BROKEN: {**TREES, **FIXED},
    "chains": {**CHAINS, **FIXED},
}
"""Without names the program starts all but the last, whose steps are the union's but for what its
drafter reads. The union verifies chains."""
REQUESTS = [greedy(max_tokens=6 + i, **({} if i % 3 else {"seed": 1})) for i in range(4)]
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of the model, as the interpreter takes its time."""
PLAIN = [greedy(max_tokens=6 + i, **OPT_OUT) for i in range(4)]


def engine(name: str) -> LLM:
    """Start an engine, which leaves the file of a warm start as it is."""
    folder = Path(tempfile.mkdtemp())
    warm_start.INTERVAL = 0.0
    llm = started(name, str(folder))
    verifier_of(llm).close()
    assert [*folder.glob("*.store")] == []
    return llm


def started(name: str, store_path: str) -> LLM:
    return v2_on_cpu.start(
        load_format="dummy",
        hf_overrides=ONE_LAYER,
        enforce_eager=False,
        compilation_config={"mode": 0},
        kv_cache_memory_bytes=16 << 20,
        max_num_seqs=4,
        speculative_config={**ENGINES[name], "store_path": store_path},
    )


def run_drafts(name: str, plain: list[Any]) -> tuple[LLM, dict[str, Any]]:
    """Start an engine that drafts; compare its output with `plain`, or fill that without drafts."""
    handed_on: list[bool] = []
    stock = v2_trees.hand_on

    def hand_on(trees: Any, *args: Any) -> None:
        handed_on.append(trees is not None)
        stock(trees, *args)

    v2_trees.hand_on = hand_on
    llm = engine(name)
    v2_trees.hand_on = stock
    assert any(handed_on) == (name == "trees"), "the check at the start verifies trees"
    adapter = runner_of(llm).adapter
    assert adapter.is_drafting, verifier_of(llm).guard.failures
    assert runner_of(llm).adaptive_verification is None
    plain.extend(() if plain else generate(llm, TEXTS[:4], PLAIN))
    put_in(llm, OracleDrafter)
    tell_oracle(plain)
    before = set(launches)
    replays, totals = start.Graph.replays, verifier_of(llm).totals
    assert differences(plain, generate(llm, TEXTS[:4], REQUESTS)) == []
    assert start.Graph.replays > replays
    assert totals.tokens > totals.steps
    result: dict[str, Any] = {"new launches": new_launches(before)}
    if name == "trees":
        (check,) = start.device_checks
        result |= {"checked_steps": check.num_steps, "largest_error": check.largest_error}
        result["refusals"] = refusals(runner_of(llm))
    return llm, result


def run_broken(plain: list[Any]) -> tuple[LLM, dict[str, Any]]:
    """Start an engine whose verification raises in the middle of a step with trees: it must serve,
    without drafts, and no later step may have those trees."""
    stock = v2_trees.walk_trees

    def fault(*args: Any) -> Any:
        raise RuntimeError("a fault of the plugin")

    v2_trees.walk_trees = fault
    try:
        llm = engine(BROKEN)
    finally:
        v2_trees.walk_trees = stock
    assert not runner_of(llm).adapter.is_drafting
    assert verifier_of(llm).step.tree_batch is verifier_of(llm).step.places is None
    assert differences(plain, generate(llm, TEXTS[:4], REQUESTS)) == []
    assert verifier_of(llm).totals.steps == 0  # nothing has waited for tokens
    (counted,) = (
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:trie_draft_failures" and metric.labels["reason"] == "start_check"
    )
    assert counted == 1
    return llm, {}


def search(llm: LLM) -> None:
    """Search in graphs; what a search finds is compared in other tests. Before it comes the check,
    while vLLM watches for kernels of its own that are compiled."""
    before = set(launches)
    passes_at_start(llm)
    assert new_launches(before, "vllm.v1.worker.gpu.sample.") == []
    text, params = request_of(Case(tuple(TEXTS[3]["prompt_token_ids"]), 2, False, 1.0, 5))
    replays, counters = start.Graph.replays, scheduler_of(llm).beam_counters
    num_groups = counters.groups
    output = llm.generate(text, params, use_tqdm=False)[0]
    assert len(output.outputs) == 2
    assert (counters.groups, counters.groups_failed) == (num_groups + 1, 0)
    assert start.Graph.replays > replays


def main() -> None:
    v2_on_cpu.schedule_as_on_a_gpu()
    start.start_as_on_a_gpu()
    record_launches()
    v2_on_cpu.use_v2(True)
    results: dict[str, Any] = {}
    plain: list[Any] = []
    for name in sys.argv[1:] or [*ENGINES][:-1]:
        print(name, flush=True)
        llm, results[name] = run_broken(plain) if name == BROKEN else run_drafts(name, plain)
    search(llm)
    print("RESULT " + json.dumps({**results, "launches": sorted(launches)}))


if __name__ == "__main__":
    main()
