"""Run some searches on two tensor-parallel ranks, next to ordinary requests.

``python -m tests.engine.beam.tensor_parallel_run`` compares them with the oracle and prints the
number of hypotheses compared.
"""

from __future__ import annotations

from vllm import LLM

from tests.engine.beam.cases import few_cases, greedy_requests, run_mixed
from tests.engine.sleeping_ranks import let_ranks_sleep
from vllm_trie.tiny_model import model_path


def main() -> None:
    let_ranks_sleep()
    path = str(model_path())
    llm = LLM(
        path,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        max_model_len=512,
        max_num_seqs=32,
        tensor_parallel_size=2,
    )
    compared = run_mixed(llm, path, few_cases(), greedy_requests(6))
    print(f"compared {compared} hypotheses")


if __name__ == "__main__":
    main()
