"""Run some searches in an engine of its own processes and compare them with the oracle.

``python -m tests.engine.beam.mode_run '{"tensor_parallel_size": 2}'`` prints the number of
hypotheses compared.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM

    from tests.engine.beam.cases import few_cases, run_cases
    from vllm_trie.tiny_model import model_path

    options = {
        "model": str(model_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "max_model_len": 512,
        "max_num_seqs": 32,
        **json.loads(sys.argv[1]),
    }
    compared = run_cases(LLM(**options), options["model"], few_cases())
    print(f"compared {compared} hypotheses")


if __name__ == "__main__":
    main()
