"""Drafts on Model Runner V2 with several ranks, against plain V2 with one, on a CPU.

A program of its own, see :mod:`tests.engine.v2_on_cpu`; its ranks import it too. Prints one JSON
object. The tests compare one engine; without names it compares all:

    python -m tests.engine.v2_ranks [ENGINE ...]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

from vllm import LLM

from tests.engine.compare import differences, generate, preemptions
from tests.engine.v2_run import AS_CHAINS, CHAINS, MIXED, TEXTS, TREES, UNION, engine

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # a rank has no NUMA node of its own
v2_on_cpu.schedule_as_on_a_gpu()

TENSORS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "trees, tensors": {"speculative_config": TREES, **TENSORS},
    "chains, stages": {"speculative_config": CHAINS, **STAGES},
    "union, stages": {"speculative_config": {**UNION, **AS_CHAINS}, **STAGES},
    "chains, both": {"speculative_config": CHAINS, **TENSORS, **STAGES},
}


def compare(expected: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Compare one engine's outputs; count its drafts."""
    llm = engine(**options)
    with preemptions(llm) as preempted:
        found = generate(llm, TEXTS, MIXED)
    counted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    _kept.append(llm)
    return {
        "differences": differences(expected, found),
        "async": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
        "accepted": counted["vllm:spec_decode_num_accepted_tokens"],
        "preempted": len(preempted),
    }


_kept: list[LLM] = []
"""An engine that is freed ends the process groups of the others."""


def main() -> None:
    plain = engine()
    _kept.append(plain)
    expected = generate(plain, TEXTS, MIXED)
    results = {name: compare(expected, ENGINES[name]) for name in sys.argv[1:] or ENGINES}
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
