"""An engine that starts with what an earlier one learned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.compare import speculation
from tests.engine.conftest import Engines
from tests.engine.prompts import prompts
from tests.extras.memory.unit.redis_server import RedisServer
from vllm_trie.extras.memory.store_file import read_store
from vllm_trie.lab.local_engine import verifier_of

PROMPTS = prompts(4)


def run(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[list[Any], Any, str]:
    """Answer with an engine of its own; return tokens, tokens per step, and the log."""
    options = speculation("ngram_trie", 16, store_tokens=1 << 18, store_path=str(folder))
    caplog.clear()
    engines = Engines()
    llm = engines(**options)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    totals = verifier_of(llm).totals
    ratio = totals.tokens / totals.steps
    del llm
    engines.close()
    return [r.outputs[0].token_ids for r in results], ratio, caplog.text


def test_a_restart_is_warm_and_gives_the_same_tokens(tmp_path, plugin_log):
    folder = tmp_path / "store"
    tokens, cold, said = run(folder, plugin_log)
    assert "cold start" in said
    [path] = folder.glob("*.store")
    texts = read_store(path)
    assert sorted(text.token_ids.tolist() for text in texts) == sorted(map(list, tokens))
    again, warm, said = run(folder, plugin_log)
    assert "warm start from" in said
    assert again == tokens
    assert warm > cold


def test_replicas_share_and_forget_when_told(tmp_path):
    server, engines = RedisServer(tmp_path), Engines()
    options = speculation("ngram_trie", 16, store_tokens=1 << 18, store=server.url)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)

    def answer(llm: Any) -> tuple[list[list[int]], float]:
        totals = verifier_of(llm).totals
        before = totals.tokens, totals.steps
        results = llm.generate(PROMPTS, params, use_tqdm=False)
        rate = (totals.tokens - before[0]) / (totals.steps - before[1])
        return [list(result.outputs[0].token_ids) for result in results], rate

    first, second = engines(**options), engines(**options, max_num_seqs=8)
    short = SamplingParams(max_tokens=4)
    second.generate([[5, 6, 7]], short, use_tqdm=False)
    expected, cold = answer(first)
    first.generate([[5, 6, 7]], short, use_tqdm=False)  # its step learns of the ended requests
    time.sleep(1.0)
    tokens, warm = answer(second)
    assert tokens == expected
    assert warm > 1.2 * cold
    server.kill()
    second.collective_rpc("reload_weights")
    assert second.reset_prefix_cache()
    tokens, kept = answer(second)
    assert tokens == expected
    assert kept >= warm
    second.collective_rpc("reset_drafts")
    tokens, forgotten = answer(second)
    assert tokens == expected
    assert forgotten < warm / 1.2
    engines.close()
