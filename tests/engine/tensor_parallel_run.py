"""Generates on two tensor-parallel ranks: `python -m tests.engine.tensor_parallel_run FILE`.

FILE holds prompts, the number of tokens and the speculative configuration as JSON. It is replaced
by the outputs, the counters, and the number of native searches' hypotheses that equal the oracle's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from tests.engine.beam.cases import few_cases, greedy_requests, run_mixed
from tests.engine.sleeping_ranks import let_ranks_sleep
from vllm_trie.lab.tiny_model import model_path


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, and look at its counters before it searches."""
    llm = LLM(
        str(model_path()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=32,
        block_size=32,
        kv_cache_memory_bytes=40 << 20,
        tensor_parallel_size=2,
        disable_log_stats=False,
        speculative_config=job["speculative_config"],
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counters: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:trie_"):
            counters[metric.name] = counters.get(metric.name, 0) + metric.value
    return {
        "outputs": [list(o.outputs[0].token_ids) for o in outputs],
        "counters": counters,
        "hypotheses": run_mixed(llm, str(model_path()), few_cases(), greedy_requests(6)),
    }


def main(file: Path) -> None:
    let_ranks_sleep()
    file.write_text(json.dumps(generate(json.loads(file.read_text()))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
