"""A start on vLLM 0.33 where 0.33 is not listed, and what a reading of its files finds.

``python -m tests.extras.device_checks.engine.release_check_run``, over its Python files.
"""

from __future__ import annotations

import json
from typing import Any

from vllm import LLM, SamplingParams

from tests.engine.compare import differences, generate, speculation
from tests.engine.prompts import prompts
from tests.unit.lab.test_other_vllm import compare
from vllm_trie.hooks import plugin
from vllm_trie.hooks.ledger import table
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.lab.tiny_model import model_path


def started(**options: Any) -> tuple[str | None, list[Any]]:
    """Start an engine; return why it has searches off, and what it generates."""
    llm = LLM(
        str(model_path()),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=512,
        max_num_seqs=16,
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = generate(llm, prompts(3), params)
    reason = reason_off(llm.llm_engine.vllm_config)
    llm.llm_engine.engine_core.shutdown()
    return reason, outputs


def main() -> None:
    table.SUPPORTED_VLLM_VERSIONS = ("0.32",)
    plugin._installed.clear()
    off, expected = started()
    other_off, outputs = started(**speculation("ngram_trie", 8))
    counts = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
    result = {
        "status": plugin.status(),
        "off": [off, other_off],
        "differences": differences(expected, outputs),
        "accepted": sum(count["num_accepted_draft_tokens"] for count in counts),
        "read": compare(),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
