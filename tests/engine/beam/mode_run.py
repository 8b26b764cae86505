"""Run some searches in an engine of its own process and compare them with the oracle.

``python -m tests.engine.beam.mode_run '{"tensor_parallel_size": 2}'`` prints the number of
hypotheses compared. ``{"asynchronous": true}`` forces asynchronous scheduling, in this process.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    options = json.loads(sys.argv[1])
    asynchronous = options.pop("asynchronous", False)
    if asynchronous:
        from tests.engine.beam.async_on_cpu import force_async_scheduling

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        force_async_scheduling()
    from vllm import LLM

    from tests.engine.beam.cases import few_cases, greedy_requests, run_cases, run_mixed
    from vllm_trie.tiny_model import model_path

    options = {
        "model": str(model_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "max_model_len": 512,
        "max_num_seqs": 32,
        **options,
    }
    llm = LLM(**options)
    if asynchronous:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert type(scheduler).__name__ == "AsyncTrieBeamScheduler"
        assert llm.llm_engine.model_executor.driver_worker.worker.model_runner.use_async_scheduling
    compared = run_cases(llm, options["model"], few_cases())
    compared += run_mixed(llm, options["model"], few_cases(), greedy_requests(6))
    print(f"compared {compared} hypotheses")


if __name__ == "__main__":
    main()
