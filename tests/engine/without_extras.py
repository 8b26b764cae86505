"""An engine that drafts, verifies and searches, and what it did."""

from __future__ import annotations

import sys
from typing import Any

from tests.engine.beam.cases import few_cases, run_cases
from tests.engine.compare import accepted_tokens, differences, generate, speculation
from tests.engine.prompts import prompts
from vllm_trie.lab.tiny_model import model_path

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 100 << 20,
    "enforce_eager": True,
}


def run() -> dict[str, Any]:
    """Decode and search without extras."""
    from vllm import LLM, SamplingParams

    texts, params = prompts(4), SamplingParams(temperature=0.0, max_tokens=60)
    expected = generate(LLM(str(model_path()), **SETTINGS), texts, params)
    llm = LLM(str(model_path()), **SETTINGS, **speculation("ngram_trie", 16))
    return {
        "differences": differences(expected, generate(llm, texts, params)),
        "accepted": accepted_tokens(llm),
        "hypotheses": run_cases(llm, str(model_path()), few_cases()),
        "extras": [name for name in sys.modules if name.startswith("vllm_trie.extras.")],
    }
