"""The check of native searches at the start of engines that are processes of their own.

``python -m tests.extras.device_checks.engine.search_check_run`` pretends a GPU to the check, which
forked engines inherit. It compares what the front end does after a check that passes and after one
that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

from tests.engine.beam.cases import prompt
from tests.engine.beam.test_entrances import beam_params
from tests.extras.device_checks.engine.test_searches_check import without_tails
from tests.processes import note_lines
from vllm_trie.extras.device_checks import search_check
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.lab.tiny_model import model_path
from vllm_trie.searches.engine.frontend import beam_api

SOURCE: list[Any] = [{"prompt_token_ids": list(prompt(2, 40))}]


def started(break_it: Callable[[pytest.MonkeyPatch], None] | None) -> tuple[str | None, list[Any]]:
    """Start an engine; return why its front end has searches off, and what a search finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_check, "is_cuda", lambda: True)
        if break_it is not None:
            break_it(patch)
        llm = LLM(
            str(model_path()),
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,
            max_model_len=256,
            max_num_seqs=16,
        )
    reason = reason_off(llm.llm_engine.vllm_config)
    if reason is not None:
        with pytest.raises(ValueError, match="native beam search is off"):
            llm.generate(SOURCE, beam_params(3), use_tqdm=False)
    [result] = llm.beam_search(SOURCE, BeamSearchParams(beam_width=3, max_tokens=6))
    llm.llm_engine.engine_core.shutdown()
    return reason, [(sequence.tokens, sequence.cum_logprob) for sequence in result.sequences]


def main() -> None:
    said: list[str] = []
    note_lines(beam_api.logger.name, said)
    native = started(None)
    assert native[0] is None
    assert not said
    refused = started(without_tails)
    assert "differ by" in str(refused[0])
    assert str(refused[0]) in said[-1], said
    for (tokens, total), (expected, expected_total) in zip(refused[1], native[1], strict=True):
        assert tokens == expected
        assert abs(total - expected_total) < 1e-4
    print("checked 2 starts")


if __name__ == "__main__":
    main()
