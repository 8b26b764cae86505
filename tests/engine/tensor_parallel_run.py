"""Generates on two tensor-parallel ranks: `python -m tests.engine.tensor_parallel_run FILE`.

FILE holds prompts, the number of tokens and the speculative configuration as JSON; it is replaced
by the outputs and the counters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_trie.tiny_model import model_path


def main(file: Path) -> None:
    job = json.loads(file.read_text())
    llm = LLM(
        str(model_path()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
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
    found = {"outputs": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
