"""Drafts on Model Runner V2 with several ranks, against plain V2 with one, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`; its ranks import it too. Prints one JSON
object. The tests compare some engines; without names it compares all:

    python -m tests.engine.v2_ranks [ENGINE ...]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import torch
from vllm import LLM

from tests.engine.compare import differences, generate, preemptions
from tests.engine.sleeping_ranks import let_ranks_sleep
from tests.engine.v2_order import FILE, note_order, orders
from tests.engine.v2_run import AS_CHAINS, CHAINS, TEXTS, TREES, UNION, engine, greedy
from vllm_trie.drafts.budget import NodeBudget, StepCost

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # a rank has no NUMA node of its own
v2_on_cpu.schedule_as_on_a_gpu()
let_ranks_sleep()

note_order()


def pauses() -> Path:
    """The file that lets the node budgets of all processes pause."""
    return Path(os.environ[FILE] + ".pauses")


REQUESTS = [greedy(max_tokens=6 + 2 * i) for i in range(6)]
"""All may draft: the host waits for each step, and the n-th wait is the n-th step's."""
REAL = "V2_REAL_BUDGETS"
"""Environment variable of an engine whose budgets decide by themselves."""


def replace_budgets() -> None:
    """Let budgets draft after all steps and verify all nodes, unless they are to pause; of those
    that decide by themselves, let nodes cost more on rank 0 than on the other."""
    should_draft, cut, stock_expect = NodeBudget.should_draft, NodeBudget.cut, StepCost.expect

    def should_draft_or_not(self: NodeBudget, num_rows: int) -> bool:
        return should_draft(self, num_rows) if REAL in os.environ else not pauses().exists()

    def cut_or_not(self: NodeBudget, trees: Any, num_rows: int) -> list[Any]:
        return cut(self, trees, num_rows) if REAL in os.environ else list(trees)

    def expect(self: StepCost, num_tokens: int, seconds: float) -> None:
        stock_expect(self, num_tokens, seconds * num_tokens ** (1 - torch.distributed.get_rank()))

    NodeBudget.should_draft = should_draft_or_not  # type: ignore[method-assign]
    NodeBudget.cut, StepCost.expect = cut_or_not, expect  # type: ignore[method-assign]


replace_budgets()
BUDGETED = {**CHAINS, "node_budget": "adaptive"}
TENSORS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "chains, mp": {"speculative_config": BUDGETED, "distributed_executor_backend": "mp"},
    "trees, tensors": {"speculative_config": TREES, **TENSORS},
    "chains, tensors": {"speculative_config": {**BUDGETED}, **TENSORS},
    "chains, stages": {"speculative_config": CHAINS, **STAGES},
    "union, stages": {"speculative_config": {**UNION, **AS_CHAINS}, **STAGES},
    "chains, both": {"speculative_config": CHAINS, **TENSORS, **STAGES},
    "chains, uni": {"speculative_config": BUDGETED, "distributed_executor_backend": "uni"},
}


def run(llm: LLM) -> dict[str, Any]:
    """Return one engine's outputs, and what it counted."""
    with preemptions(llm) as preempted:
        outputs = generate(llm, TEXTS, REQUESTS)
    # Returns after the wait for the last step's output, which is part of what is recorded.
    llm.collective_rpc("check_health")
    counted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {
        "outputs": outputs,
        "async": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
        "accepted": counted["vllm:spec_decode_num_accepted_tokens"],
        "preempted": len(preempted),
    }


def main() -> None:
    # "uni" and plain V2 come last: ranks cannot be forked from a process that is one itself.
    results = {}
    folder = Path(tempfile.mkdtemp())
    for number, name in enumerate(sys.argv[1:] or ENGINES):
        os.environ[FILE] = str(folder / str(number))
        if name == "chains, tensors":
            os.environ[REAL] = "1"
        llm = engine(**ENGINES[name])
        record = Path(os.environ[FILE])
        record.unlink(missing_ok=True)  # of the start
        results[name] = run(llm)
        results[name]["order"] = orders(record)
        if ENGINES[name]["speculative_config"] is BUDGETED:
            pauses().touch()
            results[f"pauses, {name}"] = run(llm)
            results[f"pauses, {name}"]["order"] = orders(record)
            pauses().unlink()
        del os.environ[FILE]
        os.environ.pop(REAL, None)
    shutil.rmtree(folder)
    plain = engine()
    expected = generate(plain, TEXTS, REQUESTS)
    for result in results.values():
        result["differences"] = differences(expected, result.pop("outputs"))
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
