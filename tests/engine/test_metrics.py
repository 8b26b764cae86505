"""The counters say what happened: against the outputs, against vLLM's own, in the log."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.engine.compare import (
    generate,
    plain_outputs,
    speculation,
)
from tests.engine.prompts import prompts
from vllm_trie.drafts.engine.scheduler.speculation import TreeSpecDecodingStats
from vllm_trie.hooks.wire import STATS_ATTRIBUTE, TreeStats
from vllm_trie.lab.local_engine import scheduler_of, verifier_of
from vllm_trie.lab.tiny_model import model_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def traffic(_engines):
    """An engine and all outputs it has made; no engine starts after it.

    vLLM forgets the counters of earlier engines of a process when it starts another.
    """
    plain_outputs(_engines(), prompts(8), GREEDY)
    llm = _engines(**speculation("ngram_trie", 12), max_num_seqs=7)
    return llm, generate(llm, prompts(8), GREEDY)


def counter(llm: Any, name: str) -> int:
    """One of the counters, summed over its labels."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def pending(llm: Any) -> TreeStats:
    """What the scheduler keeps for the next step with drafts."""
    return getattr(scheduler_of(llm), STATS_ATTRIBUTE, None) or TreeStats()


def seconds(name: str) -> float:
    """A counter as it is; vLLM's snapshot rounds counters down to whole numbers."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        if metric.name == name
        for sample in metric.samples
        if sample.name == f"{name}_total"
    )


def test_nodes_and_accepted_tokens_are_those_that_vllm_counts(traffic):
    llm, _ = traffic
    for ours, theirs in (
        ("draft_nodes", "num_draft_tokens"),
        ("accepted_tokens", "num_accepted_tokens"),
        ("verified_trees", "num_drafts"),
    ):
        count = counter(llm, f"vllm:trie_{ours}")
        assert count == counter(llm, f"vllm:spec_decode_{theirs}")
        assert count > 20, ours


def test_tokens_and_steps_are_those_of_the_outputs(traffic):
    llm, outputs = traffic
    tokens = counter(llm, "vllm:trie_tokens") + pending(llm).tokens
    steps = counter(llm, "vllm:trie_steps") + pending(llm).steps
    assert tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
    # Each step of a request brings the accepted tokens and one more.
    assert tokens == steps + counter(llm, "vllm:trie_accepted_tokens")
    assert counter(llm, "vllm:trie_verified_trees") <= steps
    assert counter(llm, "vllm:trie_draft_nodes") <= 12 * steps


def test_vllms_own_acceptance_by_position(traffic):
    llm, _ = traffic
    (by_position,) = (
        metric.values
        for metric in llm.get_metrics()
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos"
    )
    assert len(by_position) == 12
    assert sum(by_position) == counter(llm, "vllm:spec_decode_num_accepted_tokens")
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[0] <= counter(llm, "vllm:spec_decode_num_drafts")


def test_times_are_those_of_the_worker(traffic):
    llm, outputs = traffic
    verifier, waiting = verifier_of(llm), pending(llm)
    assert verifier.totals.drafting_seconds == pytest.approx(verifier.guard.seconds, rel=0.01)
    for name in ("drafting_seconds", "verification_seconds"):
        counted = seconds(f"vllm:trie_{name}") + getattr(waiting, name)
        assert counted == pytest.approx(getattr(verifier.totals, name)), name
    overhead = verifier.totals.preparation_seconds + verifier.totals.bookkeeping_seconds
    counted = waiting.preparation_seconds + waiting.bookkeeping_seconds
    assert counted + seconds("vllm:trie_overhead_seconds") == pytest.approx(overhead)
    begun = min(output.metrics.scheduled_ts for output in outputs)
    whole = max(output.metrics.last_token_ts for output in outputs) - begun
    assert 0.002 < overhead / whole < 1


def test_labels(traffic):
    llm, _ = traffic
    labels_of_metrics = [m.labels for m in llm.get_metrics() if m.name.startswith("vllm:trie_")]
    assert len(labels_of_metrics) >= 10
    for labels in labels_of_metrics:
        assert labels["method"] == "ngram_trie"
        assert labels["engine"] == "0"
        assert labels["model_name"] == str(model_path())


@pytest.fixture
def log(plugin_log):
    """What an engine logs at vLLM's interval."""

    def lines(llm: Any) -> list[str]:
        plugin_log.clear()
        llm.llm_engine.do_log_stats()
        return [r.getMessage() for r in plugin_log.records if r.name.startswith("vllm.vllm_trie")]

    return lines


def test_log_line(traffic, log):
    llm, outputs = traffic
    log(llm)
    names = ("tokens", "steps", "draft_nodes", "accepted_tokens", "verified_trees")
    before = {name: counter(llm, f"vllm:trie_{name}") for name in names}
    outputs += generate(llm, prompts(4), GREEDY)  # the other tests count them too
    during = {name: counter(llm, f"vllm:trie_{name}") - before[name] for name in names}
    (line,) = log(llm)
    tokens_per_step = during["tokens"] / during["steps"]
    assert tokens_per_step > 1
    trees = during["verified_trees"]
    assert f"vllm-trie ngram_trie: {tokens_per_step:.2f} tokens per step" in line
    assert f"{during['draft_nodes'] / trees:.1f} nodes drafted" in line
    assert f"{during['accepted_tokens'] / trees:.2f} accepted per tree" in line
    assert "failed drafts: 0" in line
    (gauge,) = (m.value for m in llm.get_metrics() if m.name == "vllm:trie_tokens_per_step")
    assert gauge == pytest.approx(tokens_per_step)
    assert log(llm) == []  # nothing happened since


def test_generate_logs_drafted_and_accepted_tokens(traffic, plugin_log):
    llm, outputs = traffic
    names = ("draft_nodes", "accepted_tokens", "verified_trees")
    before = [counter(llm, f"vllm:trie_{name}") for name in names]
    results = llm.generate(prompts(3), GREEDY)
    outputs += results  # the other tests count them too
    after = [counter(llm, f"vllm:trie_{name}") for name in names]
    drafted, accepted, drafts = (b - a for a, b in zip(before, after, strict=True))
    assert plugin_log.messages == [
        f"vllm-trie ngram_trie: {accepted} of {drafted} drafted tokens accepted, in {drafts} "
        f"drafts; {sum(len(result.outputs[0].token_ids) for result in results)} output tokens"
    ]
    counts = [result.outputs[0].spec_decode_metrics.to_dict() for result in results]
    assert sum(count["num_draft_tokens"] for count in counts) == drafted > 0
    assert sum(count["num_accepted_draft_tokens"] for count in counts) == accepted > 0
    plugin_log.clear()
    outputs += llm.generate(prompts(1), GREEDY, use_tqdm=False)
    assert plugin_log.messages == []


STATS = {"num_spec_tokens": 3, "num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 1}


@pytest.mark.parametrize(
    "sent",
    [
        None,
        SpecDecodingStats(**STATS),  # of a stock method, beside which the plugin is loaded
        TreeSpecDecodingStats(**STATS, tree=TreeStats(steps=4, draft_failures={"error": 2})),
    ],
)
def test_the_way_to_another_process(sent):
    """An engine core that runs in its own process sends its statistics as msgpack."""
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=sent))
    buffers = MsgpackEncoder().encode(outputs)
    received = MsgpackDecoder(EngineCoreOutputs).decode(buffers).scheduler_stats
    stats = received.spec_decoding_stats
    if sent is None:
        assert stats is None
        return
    assert {key: getattr(stats, key) for key in STATS} == STATS
    assert stats.tree == getattr(sent, "tree", TreeStats())
