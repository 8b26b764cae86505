"""What must hold on a patched vLLM; run by `test_patches.py`, in a process of its own.

Its name keeps it out of the suite on stock vLLM, where every check would fail.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.engine.beam import server_off
from tests.engine.compare import differences, generate, speculation
from tests.engine.conftest import runner_of, scheduler_of, trees_of
from tests.engine.prompts import prompts
from tests.engine.serving import running
from vllm_trie.vllm_hooks import ledger, plugin

FOLDER = Path(os.environ["PATCHED_VLLM"])
STILL_WRAPPED = {
    "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
    "vllm.config.vllm:VllmConfig.compute_hash",
    "vllm.entrypoints.common.offline:OfflineInferenceMixin._run_engine",
    "vllm.entrypoints.openai.chat_completion.serving:"
    "OpenAIServingChat.chat_completion_full_generator",
    "vllm.entrypoints.openai.completion.serving:"
    "OpenAIServingCompletion.request_output_to_completion_response",
    "vllm.envs:environment_variables",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
    "vllm.v1.engine.core:EngineCore.__init__",
    "vllm.v1.engine.core:EngineCoreProc._make_ready_response",
    "vllm.v1.engine.core_client:MPClient._apply_ready_response",
    "vllm.v1.engine.output_processor:OutputProcessor.add_request",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
    "vllm.v1.worker.gpu_model_runner:copy_kv_cache_blocks_inplace",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
}
"""The choice of V1 for trained drafters, which a patched vLLM has no place for and which is refused
there, what compilation depends on, the names of environment variables, a line of counts, drafts
that give way to streams, a fault of vLLM's on CPUs, and of beam search what the series has no
extension points for yet."""
CALLABLES = [
    hook
    for hook in ledger.entries()
    if hook.target not in STILL_WRAPPED and callable(ledger.resolve(hook.target))
]


@pytest.fixture(scope="module", autouse=True)
def _plugin_is_loaded() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def test_this_is_the_patched_copy() -> None:
    assert Path(vllm.__file__).parent == FOLDER / "vllm"
    missing = [point for point in ledger.EXTENSION_POINTS if not ledger.offered(point)]
    assert missing == []
    assert plugin.status() == {"speculation": "ok", "beam": "ok"}


def defined_in(target: Any) -> Path:
    """The file of a function's code or of a class."""
    code = getattr(target, "__code__", None)
    return Path(inspect.getsourcefile(target) if code is None else code.co_filename)


def test_what_is_replaced_all_the_same() -> None:
    assert {hook.target for hook in ledger.patches_in_place()} == STILL_WRAPPED


@pytest.mark.parametrize("hook", CALLABLES, ids=lambda hook: f"{hook.feature} {hook.target}")
def test_nothing_is_replaced_at_run_time(hook: ledger.Patch) -> None:
    symbol = ledger.resolve(hook.target)
    if hook.target.endswith("cache_clear"):  # built-in, of a function of vLLM's
        symbol = ledger.resolve(hook.target.rpartition(".")[0])
    if hasattr(symbol, "cache_info"):
        symbol = symbol.__wrapped__  # by functools.cache
    assert hook not in ledger.patches_in_place()
    original = inspect.unwrap(symbol)  # vLLM decorates some of its functions itself
    assert defined_in(original).is_relative_to(FOLDER / "vllm")
    while symbol is not original:
        assert not defined_in(symbol).is_relative_to(Path(plugin.__file__).parents[1])
        symbol = symbol.__wrapped__


def test_statistics_keep_vllms_type() -> None:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    assert SchedulerStats.__annotations__["spec_decoding_stats"] == SpecDecodingStats | None


def test_speculation_runs_in_vllms_own_worker_and_runner(engine) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    llm = engine(**speculation("ngram_trie", 32))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    assert type(worker) is CPUWorker
    assert type(worker.model_runner) is CPUModelRunner
    totals = trees_of(llm).totals
    before = totals.tokens - totals.steps
    greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, detokenize=False)
    outputs = generate(llm, prompts(6), greedy)
    assert differences(generate(engine(), prompts(6), greedy), outputs) == []
    assert totals.tokens - totals.steps > before + 50


def test_drafters_get_the_cache_salt_in_a_field_of_vllms(engine) -> None:
    llm = engine(**speculation("ngram_trie", 32))
    drafter = trees_of(llm).guard.drafter
    stock, seen = drafter.propose, []

    def propose(requests: Any) -> Any:
        seen.extend(request.cache_salt for request in requests)
        return stock(requests)

    drafter.propose = propose
    try:
        short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        generate(llm, [{**prompts(1)[0], "cache_salt": "theirs"}], short)
    finally:
        del drafter.propose
    assert seen
    assert set(seen) == {"theirs"}


@pytest.mark.parametrize("speculation_wanted", [False, True])
def test_steps_without_drafts_are_not_prepared_for_drafts(
    engine, monkeypatch, speculation_wanted: bool
) -> None:
    llm = engine(**speculation("ngram_trie", 32))
    verifier = runner_of(llm).draft_verifier
    stock, prepared = verifier.verify, []

    def verify(logits: Any, spec_decode_metadata: Any) -> Any:
        prepared.append(spec_decode_metadata is not None)
        return stock(logits, spec_decode_metadata)

    monkeypatch.setattr(verifier, "verify", verify)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        ignore_eos=True,
        detokenize=False,
        extra_args={"speculation": speculation_wanted},
    )
    outputs = generate(llm, prompts(2), params)
    assert len(prepared) > 1
    assert any(prepared) == speculation_wanted
    assert not prepared[0]  # the prompts
    assert differences(generate(engine(), prompts(2), params), outputs) == []


def test_beam_search_runs_in_the_scheduler(engine) -> None:
    llm = engine()
    scheduler = scheduler_of(llm)
    assert type(scheduler).__module__ == "vllm_trie.vllm_hooks.scheduler.beam_scheduler"
    groups = scheduler.beam_counters.groups
    [output] = llm.beam_search(prompts(1), BeamSearchParams(beam_width=3, max_tokens=8))
    assert scheduler.beam_counters.groups == groups + 1
    assert len(output.sequences) == 3
    assert [s.score for s in output.sequences] == sorted(
        (s.score for s in output.sequences), reverse=True
    )


def test_a_server_whose_native_beam_search_is_off(tmp_path: Path) -> None:
    with running(tmp_path / "log", *server_off.OPTIONS) as server:
        server_off.check_beam_replies(server_off.ask_for_beams(server))
