"""Groups, forks, preemption, aborts and leaks, on a worker that checks every KV slot."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.beam.simulation import Simulation, expected_beam, expected_greedy
from vllm_trie.searches.engine.scheduler.group import BeamGroup


def check_beam(simulation: Simulation, name: str, expected: list[Any]) -> None:
    """Compare as many hypotheses as the request returns."""
    hypotheses = simulation.finished[name].hypotheses
    assert hypotheses
    assert hypotheses == expected[: len(hypotheses)]


@pytest.mark.parametrize("asynchronous", [False, True, "device"])
@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_one_group(vllm_config, width, asynchronous):
    simulation = Simulation(vllm_config, num_blocks=400, asynchronous=asynchronous)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    simulation.add_beam("a", prompt, width, width, max_tokens=12)
    simulation.run()
    check_beam(simulation, "a", expected_beam(prompt, width, max_tokens=12))
    simulation.check_clean()
    counters = simulation.scheduler.beam_counters
    assert counters.beams_preempted == counters.beams_recomputed == 0
    assert counters.groups == 1
    assert (counters.steps_ahead > 4) == (asynchronous == "device")


@pytest.mark.parametrize("asynchronous", [False, True, "device"])
def test_groups_share_batches_with_greedy_requests(vllm_config, asynchronous):
    simulation = Simulation(vllm_config, num_blocks=400, max_num_seqs=12, asynchronous=asynchronous)
    prompts = [[i + 1, 5, i + 2, 9, 9, i] for i in range(8)]
    for i in range(4):
        simulation.add_beam(f"b{i}", prompts[i], 4, 2)
    for i in range(8):
        simulation.add_greedy(f"g{i}", prompts[i])
    simulation.run()
    for i in range(4):
        check_beam(simulation, f"b{i}", expected_beam(prompts[i], 4))
    for i in range(8):
        assert simulation.finished[f"g{i}"].token_ids == expected_greedy(prompts[i])
    simulation.check_clean()


@pytest.mark.parametrize("asynchronous", [False, True, "device"])
def test_search_keeps_its_adapter_from_others(vllm_config, asynchronous):
    """Also in steps in which it waits for its own tokens."""
    simulation = Simulation(vllm_config, num_blocks=400, asynchronous=asynchronous, max_loras=1)
    simulation.add_beam("b", [1, 2, 3], 4, 2)
    simulation.add_greedy("g", [4, 5])
    simulation.run()
    check_beam(simulation, "b", expected_beam([1, 2, 3], 4))
    assert simulation.finished["g"].token_ids == expected_greedy([4, 5])
    simulation.check_clean()


def blocks_of_trie(group, block_size):
    """Count the blocks of a trie of token sequences: one for each distinct prefix that fills a
    block, and one for each sequence that goes on behind its last full block."""
    length = group.beams.proxy.num_computed_tokens
    sequences = [
        (*group.request.prompt_token_ids, *generated)[:length]
        for generated in group.search.generated.tolist()
    ]
    full_blocks = {
        sequence[:end]
        for sequence in sequences
        for end in range(block_size, len(sequence) + 1, block_size)
    }
    return len(full_blocks) + sum(len(sequence) % block_size > 0 for sequence in sequences)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("width", [3, 9])
def test_blocks_are_those_of_the_trie(vllm_config, width, block_size):
    """In every step, so at the peak too; and hypotheses cost far less than sequences."""
    prompt = [i % 20 + 1 for i in range(162)]
    simulation = Simulation(vllm_config, num_blocks=800, block_size=block_size)
    simulation.add_beam("b", prompt, width, width, max_tokens=24)
    scheduler, peak = simulation.scheduler, 0
    execute = simulation.worker.execute

    def count(output):
        nonlocal peak
        used = simulation.pool.num_gpu_blocks - 1 - simulation.pool.get_num_free_blocks()
        if output.total_num_scheduled_tokens:
            needed = blocks_of_trie(scheduler.beam_groups.by_id["b"], block_size)
            peak = max(peak, needed)
            assert used == needed
        return execute(output)

    simulation.worker.execute = count
    simulation.run()
    assert simulation.peak_blocks == peak
    blocks_of_one_request = -(-(162 + 24) // block_size)
    assert blocks_of_one_request < peak < blocks_of_one_request + 3 * width
    # and the prompt is computed once, every later token once per row
    assert simulation.worker.computed_tokens <= len(prompt) + width * 23


def crowd(
    vllm_config: Any, num_groups: int, prefix_caching: bool, asynchronous: bool
) -> tuple[Simulation, Callable[[], None]]:
    """Groups that together need far more than the pool, and what runs to their end and checks."""
    simulation = Simulation(
        vllm_config,
        num_blocks=20,
        max_num_seqs=32,
        prefix_caching=prefix_caching,
        asynchronous=asynchronous,
        overcommit=True,
    )
    prompts = [[i + 1, 3, i + 5, 2, 7] for i in range(num_groups)]
    for i, prompt in enumerate(prompts):
        simulation.add_beam(f"b{i}", prompt, 6, 6, max_tokens=24)

    def finish() -> None:
        simulation.run()
        for i, prompt in enumerate(prompts):
            check_beam(simulation, f"b{i}", expected_beam(prompt, 6, max_tokens=24))

    return simulation, finish


@pytest.mark.parametrize("asynchronous", [False, True, "device"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_pool_too_small_for_the_groups(vllm_config, prefix_caching, asynchronous):
    """Groups that together need far more than the pool finish nevertheless, and correctly."""
    simulation, finish = crowd(vllm_config, 4, prefix_caching, asynchronous)
    finish()
    assert sorted(simulation.finished) == [*simulation.finished]
    preempted = 0
    for answer in simulation.finished.values():  # vLLM's metrics count these
        queued, *events, scheduled = [event.name for event in answer.events]
        assert (queued, scheduled) == ("QUEUED", "SCHEDULED")
        assert events == ["SCHEDULED", "PREEMPTED"] * (len(events) // 2)
        preempted += len(events) // 2
    assert preempted > 0
    simulation.check_clean()


@pytest.mark.parametrize("asynchronous", [False, True, "device"])
@pytest.mark.parametrize(
    ("num_searches", "num_blocks", "tokens_per_step", "max_tokens", "most"),
    [
        pytest.param(1, 45, 512, 120, 4, id="hardly more blocks than beams"),
        pytest.param(3, 45, 512, 60, 4, id="several such searches"),
        pytest.param(1, 400, 20, 60, 10, id="fewer tokens per step than beams"),
    ],
)
def test_steps_are_linear_without_room(
    vllm_config, num_searches, num_blocks, tokens_per_step, max_tokens, most, asynchronous
):
    """What a step cannot hold is computed again from a few tokens back, not from the prompt."""
    simulation = Simulation(
        vllm_config,
        num_blocks=num_blocks,
        block_size=32,
        max_num_seqs=64,
        max_num_batched_tokens=tokens_per_step,
        asynchronous=asynchronous,
    )
    width = 32
    prompts = [[j * i % 20 + 1 for j in range(250)] for i in range(1, num_searches + 1)]
    options = {"max_tokens": max_tokens, "early_stopping": "never"}
    for i, prompt in enumerate(prompts):
        simulation.add_beam(f"b{i}", prompt, width, width, **options)
    counters = simulation.scheduler.beam_counters
    simulation.run(most * num_searches * max_tokens)
    for i, prompt in enumerate(prompts):
        check_beam(simulation, f"b{i}", expected_beam(prompt, width, **options))
    assert counters.beams_recomputed
    assert not counters.beams_preempted
    simulation.check_clean()


@pytest.mark.parametrize("asynchronous", [False, True, "device"])
def test_abort_in_every_state(vllm_config, asynchronous):
    for steps in range(12):
        simulation = Simulation(
            vllm_config, num_blocks=30, max_num_batched_tokens=8, asynchronous=asynchronous
        )
        prompt = list(range(1, 20))
        simulation.add_beam("gone", prompt, 4, 2)
        simulation.add_beam("waits", prompt[::-1], 14, 2)
        for _ in range(steps):
            simulation.step()
        simulation.abort("gone")
        simulation.run()
        check_beam(simulation, "waits", expected_beam(prompt[::-1], 14))
        simulation.check_clean()


def test_group_that_can_never_fit_is_refused(vllm_config, plugin_log):
    # A prompt of 200 tokens takes 50 of the 60 blocks: no room for 16 tails.
    simulation = Simulation(vllm_config, num_blocks=61)
    with plugin_log.at_level("ERROR", logger="vllm.vllm_trie"):
        simulation.add_beam("a", [1] * 200, 16, 3)
    simulation.add_beam("gone", [1] * 200, 16, 3)
    simulation.abort("gone")  # before its answer
    simulation.add_greedy("g", [1, 2, 3])
    simulation.run()
    assert simulation.finished["a"].reason == "error"
    assert simulation.finished["g"].token_ids == expected_greedy([1, 2, 3])
    simulation.check_clean()


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("asynchronous", [False, True, "device"])
def test_search_that_outgrows_the_pool_fails_alone(vllm_config, plugin_log, asynchronous, width):
    """As with a sliding window, for which vLLM sizes the pool: a search keeps all its blocks."""
    simulation = Simulation(vllm_config, num_blocks=21, asynchronous=asynchronous)
    scheduler, groups = simulation.scheduler, simulation.scheduler.beam_groups
    scheduler.max_model_len = 1000
    groups.engine = groups.engine._replace(max_model_len=1000)
    simulation.add_beam("long", [1] * 20, width, 1, max_tokens=200, min_tokens=100)
    with plugin_log.at_level("ERROR", logger="vllm.vllm_trie"):
        simulation.run()
    assert simulation.finished["long"].reason == "error"
    assert "lower max_tokens" in plugin_log.text
    assert "Traceback" not in plugin_log.text
    simulation.add_greedy("g", [1, 2, 3])
    simulation.run()
    assert simulation.finished["g"].token_ids == expected_greedy([1, 2, 3])
    simulation.check_clean()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_image_that_does_not_fit_its_id_fails_its_search_only(vllm_config, asynchronous):
    """vLLM finishes the request whose image id it knows with another number of embeddings: that
    is the proxy."""
    simulation = Simulation(vllm_config, num_blocks=100, asynchronous=asynchronous)
    simulation.add_beam("broken", [1, 2, 3], 4, 2)
    simulation.add_beam("sound", [3, 2, 1], 4, 2)
    scheduler = simulation.scheduler
    proxy = scheduler.beam_groups.by_id["broken"].beams.proxy
    scheduler.encoder_cache_mismatch_reqs.add(proxy.request_id)
    simulation.run()
    assert simulation.finished["broken"].reason == "error"
    check_beam(simulation, "sound", expected_beam([3, 2, 1], 4))
    simulation.check_clean()


@pytest.mark.parametrize("fails", ["the search", "the worker in a pass"])
def test_failure_inside_a_search_fails_its_request_only(vllm_config, monkeypatch, fails):
    simulation = Simulation(vllm_config, num_blocks=100)
    simulation.add_beam("broken", [1, 2, 3], 4, 2)
    simulation.add_beam("sound", [3, 2, 1], 4, 2)
    simulation.step()
    simulation.step()

    def fail(*args: Any) -> None:
        raise RuntimeError("on purpose")

    group = simulation.scheduler.beam_groups.by_id["broken"]
    if fails == "the search":
        monkeypatch.setattr(group.search, "advance", fail)
    else:
        group.take_candidates(None)
    simulation.run()
    assert simulation.finished["broken"].reason == "error"
    check_beam(simulation, "sound", expected_beam([3, 2, 1], 4))
    simulation.check_clean()


def test_reset_of_the_prefix_cache_with_rows_running(vllm_config):
    """Also while a prompt is computed again: the search goes on with as many blocks as it had."""
    simulation = Simulation(vllm_config, num_blocks=100, max_num_batched_tokens=4)
    prompt = [5, 6, 7, 8, 9]
    simulation.add_beam("a", prompt, 4, 4, max_tokens=16)
    for _ in range(7):
        simulation.step()
    group = simulation.scheduler.beam_groups.by_id["a"]
    num_held = group.beams.num_held
    for _ in range(2):
        assert simulation.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert group.beams.num_lost == num_held > 0
        simulation.step()
        assert not group.beams.decodes
    simulation.run()
    check_beam(simulation, "a", expected_beam(prompt, 4, max_tokens=16))
    simulation.check_clean()


def test_reset_of_the_prefix_cache_right_after_an_abort(vllm_config):
    """Nothing of the beams, nor of their copies, may hold blocks."""
    simulation = Simulation(vllm_config, num_blocks=100)
    counters = simulation.scheduler.beam_counters
    for reset_running_requests in (False, True):
        forked = counters.beams_forked
        simulation.add_beam("a", [5, 6, 7, 8, 9], 4, 4, max_tokens=16)
        while counters.beams_forked == forked:
            simulation.step()
        simulation.abort("a")
        assert simulation.scheduler.reset_prefix_cache(reset_running_requests)
        assert simulation.pool.get_num_free_blocks() == simulation.pool.num_gpu_blocks - 1
        simulation.run()
        simulation.check_clean()


@pytest.mark.parametrize("asynchronous", [False, True, "device"])
def test_pause_that_waits_for_what_runs(vllm_config, asynchronous):
    """It ends where a group has lost its blocks, and the search goes on later."""
    paused_without_blocks = 0
    for steps in range(1, 60, 4):
        simulation, finish = crowd(vllm_config, 3, False, asynchronous)
        for _ in range(steps):
            simulation.step()
        simulation.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for _ in range(200):
            if not simulation.scheduler.has_requests() and not simulation._queue:
                break
            simulation.step()
        assert not simulation.scheduler.has_requests()
        groups = simulation.scheduler.beam_groups.by_id.values()
        paused_without_blocks += any(group.started and not group.runs for group in groups)
        simulation.scheduler.set_pause_state(PauseState.UNPAUSED)
        finish()
        simulation.check_clean()
    assert paused_without_blocks


def test_groups_that_wait_are_counted(vllm_config):
    simulation = Simulation(vllm_config, num_blocks=100, max_num_seqs=8)
    for name in "abc":
        simulation.add_beam(name, [5, 6, 7], 6, 2)
    simulation.step()
    assert simulation.scheduler.get_request_counts() == (6, 12)
    assert simulation.scheduler.make_stats().num_waiting_reqs == 12
    simulation.run()
    assert simulation.scheduler.get_request_counts() == (0, 0)


def test_step_looks_at_no_group_that_waits(vllm_config, monkeypatch):
    """What a step reads of groups does not grow with their number."""
    num_reads = 0

    def count(group: BeamGroup, name: str) -> Any:
        nonlocal num_reads
        num_reads += 1
        return object.__getattribute__(group, name)

    counts = []
    for num_groups in (3, 100):
        simulation = Simulation(vllm_config, num_blocks=100, max_num_seqs=4)
        for i in range(num_groups):
            simulation.add_beam(f"b{i}", [5, 6, 7], 4, 2)
        scheduler, num_reads = simulation.scheduler, 0
        with monkeypatch.context() as patch:
            patch.setattr(BeamGroup, "__getattribute__", count, raising=False)
            for _ in range(12):  # more than a search takes
                output = scheduler.schedule()
                result = simulation.worker.execute(pickle.loads(pickle.dumps(output)))
                scheduler.update_from_output(output, result)
                assert scheduler.has_requests()
        assert scheduler.beam_counters.groups == 2
        counts.append(num_reads)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("num_blocks", "window", "prompt_len", "width", "num_started"),
    [(60, None, 3, 4, 2), (40, None, 3, 4, 1), (140, 8, 72, 4, 2), (40, 8, 64, 8, 1)],
)
def test_searches_start_by_what_they_soon_need(
    vllm_config, num_blocks, window, prompt_len, width, num_started
):
    """Not by their limit, with which each would take all blocks: the first ones are expected to
    take 25 each, those of 140 blocks 68. Blocks before a window do not count: otherwise the last
    ones would be refused, or take more passes."""
    simulation = Simulation(
        vllm_config, num_blocks=num_blocks, max_num_batched_tokens=256, window=window
    )
    prompt = [i % 3 + 5 for i in range(prompt_len)]
    limit = simulation.scheduler.max_model_len - prompt_len
    for name in "ab":
        simulation.add_beam(name, prompt, width, width, max_tokens=limit)
    simulation.step()
    counters = simulation.scheduler.beam_counters
    assert counters.groups == num_started
    simulation.run(45 if width == 8 else 400)
    for name in "ab":
        check_beam(simulation, name, expected_beam(prompt, width, max_tokens=limit))
    assert bool(counters.beams_recomputed) == (width == 8)
    simulation.check_clean()


@pytest.mark.parametrize(
    ("num_blocks", "limit", "num_started"), [(78, 1500, 1), (90, 1500, 2), (78, 110, 2)]
)
def test_search_is_expected_to_grow_as_long_again(vllm_config, num_blocks, limit, num_started):
    """After 100 steps by 100, and not beyond its limit."""
    simulation = Simulation(vllm_config, num_blocks=num_blocks)
    simulation.add_beam("a", [5, 6, 7], 4, 4, max_tokens=limit, min_tokens=limit - 1)
    for _ in range(100):
        simulation.step()
    simulation.add_beam("b", [5, 6, 7], 4, 4, max_tokens=limit)
    simulation.step()
    assert simulation.scheduler.beam_counters.groups == num_started


@pytest.mark.parametrize("asynchronous", [False, "device"])
def test_searches_that_outgrow_what_was_expected(vllm_config, asynchronous):
    simulation = Simulation(vllm_config, num_blocks=60, asynchronous=asynchronous)
    options = {"max_tokens": 230, "min_tokens": 229}
    for name in "ab":
        simulation.add_beam(name, [5, 6, 7], 4, 4, **options)
    simulation.step()
    assert simulation.scheduler.beam_counters.groups == 2
    simulation.run()
    events = [event.name for answer in simulation.finished.values() for event in answer.events]
    assert 1 <= events.count("PREEMPTED") <= 2
    assert all(len(simulation.finished[name].hypotheses) == 4 for name in "ab")
    assert simulation.finished["a"].hypotheses == simulation.finished["b"].hypotheses
    simulation.check_clean()


@pytest.mark.parametrize("num_between", [2, 10, 1000])
def test_search_that_lost_its_blocks_waits_for_them(vllm_config, num_between):
    """Older requests grow, and newer ones come: it does not begin anew to lose its blocks again."""
    engine = {"num_blocks": 200, "max_num_seqs": 32, "asynchronous": True}
    search, alone = ("b", [5] * 12, 8, 8), Simulation(vllm_config, **engine)
    alone.add_beam(*search, max_tokens=80, min_tokens=79)
    alone.run()
    simulation = Simulation(vllm_config, **engine)
    for i in range(4):
        simulation.add_greedy(f"old{i}", [i + 1] * 12, 185, ignore_eos=True)
    for step in range(400):
        if step == 10:
            simulation.add_beam(*search, max_tokens=80, min_tokens=79)
        if step % num_between == num_between - 1:
            simulation.add_greedy(f"new{step}", [step % 19 + 1] * 12, 20, ignore_eos=True)
        if simulation.scheduler.has_requests() or simulation._queue:
            simulation.step()
    assert "b" not in simulation.open
    simulation.run()
    events = [event.name for event in simulation.finished["b"].events]
    assert events == ["QUEUED", "SCHEDULED", "PREEMPTED", "SCHEDULED"]
    check_beam(simulation, "b", alone.finished["b"].hypotheses)
    simulation.check_clean()


@pytest.mark.parametrize("asynchronous", [False, "device"])
def test_search_that_loses_its_blocks_in_a_step_that_it_has_begun(vllm_config, asynchronous):
    """To a request that comes before it: neither copies nor fresh blocks of the step are left."""
    options = {"max_tokens": 24, "early_stopping": "never", "length_penalty": 2.0}
    for num_steps in range(1, 5):
        simulation = Simulation(
            vllm_config,
            num_blocks=15,
            policy="priority",
            asynchronous=asynchronous,
            overcommit=True,
        )
        simulation.add_beam("b", [5, 6, 7], 6, 6, priority=1, **options)
        for _ in range(num_steps):
            simulation.step()
        simulation.add_greedy("g", [1, 2, 3], 50, ignore_eos=True)
        simulation.run()
        check_beam(simulation, "b", expected_beam([5, 6, 7], 6, **options))
        simulation.check_clean()


def test_search_that_vllm_passes_over_has_not_started(vllm_config, monkeypatch):
    """It keeps no slots from others, and starts later."""
    simulation = Simulation(vllm_config, num_blocks=100, max_num_seqs=4)
    scheduler = simulation.scheduler
    simulation.add_beam("a", [5, 6, 7], 4, 4)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.kv_cache_manager, "allocate_slots", lambda *_, **__: None)
        simulation.step()
    assert scheduler.beam_counters.groups == 0
    assert scheduler.get_request_counts() == (0, 4)
    simulation.abort("a")
    simulation.add_greedy("g", [5, 6, 7])
    simulation.add_beam("b", [5, 6, 7], 4, 4)
    simulation.run()
    check_beam(simulation, "b", expected_beam([5, 6, 7], 4))
    simulation.check_clean()


def a_row(scheduler: Any) -> Any:
    return scheduler.beam_groups.by_id["a"].beams.proxy


def tables(scheduler: Any) -> Any:
    return a_row(scheduler).beams._tables[0]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda s: s.running.remove(a_row(s)), id="a running row is lost"),
        pytest.param(lambda s: s.running.append(a_row(s)), id="a row runs twice"),
        pytest.param(lambda s: s.waiting.prepend_request(a_row(s)), id="a running row waits"),
        pytest.param(lambda s: s.requests.pop(a_row(s).request_id), id="vLLM forgets a row"),
        pytest.param(lambda s: s.requests.pop("a"), id="vLLM forgets a search"),
        pytest.param(lambda s: s.beam_groups.by_id.pop("a"), id="a row without a group"),
        pytest.param(lambda s: tables(s).suffix[1].fill(0), id="a beam has another's blocks"),
        pytest.param(
            lambda s: tables(s).suffix.__setitem__(1, tables(s).suffix[0]),
            id="two beams have one tail",
        ),
        pytest.param(lambda s: tables(s)._blocks.pop(), id="vLLM forgets a block"),
        pytest.param(lambda s: a_row(s).grow(), id="more tokens than the beams have"),
        pytest.param(
            lambda s: s.kv_cache_manager.block_pool.touch(
                s.kv_cache_manager.get_blocks("g").blocks[0]
            ),
            id="a block has a holder too many",
        ),
        pytest.param(lambda s: setattr(s, "max_num_active_reqs", 99), id="slots that do not exist"),
    ],
)
def test_integrity_check_finds_damage(vllm_config, damage):
    simulation = Simulation(vllm_config, num_blocks=100)
    simulation.add_beam("a", [5, 6, 7, 8, 9], 4, 2, max_tokens=16)
    simulation.add_greedy("g", [5, 6, 7, 8, 9], max_tokens=16)
    for _ in range(3):
        simulation.step()
    scheduler = simulation.scheduler
    scheduler.check_integrity()
    damage(scheduler)
    with pytest.raises((AssertionError, KeyError)):
        scheduler.check_integrity()
