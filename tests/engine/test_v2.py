"""Drafts on Model Runner V2: vLLM's own runner on a CPU, its kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import needs_triton
from tests.newer_vllm import newer_vllm
from tests.processes import run_program

pytestmark = needs_triton
SALTS = ["\x009:adapter-1", "\x009:adapter-2", "\x009:adapter-2mine", "mine"]
"""Of requests with adapters, cache salts and both."""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_program("tests.engine.v2_run")


ENGINES = ("trees", "synchronous trees", "asynchronous", "synchronous", "ahead")
"""The synchronous ones draft with `trie_union` and Medusa heads, `trees` most of the true path."""


@pytest.fixture(params=ENGINES)
def result(request: pytest.FixtureRequest, results: dict[str, Any]) -> dict[str, Any]:
    return results[request.param]


@pytest.fixture(params=["synchronous", "asynchronous"])
def chains(request: pytest.FixtureRequest, results: dict[str, Any]) -> dict[str, Any]:
    return results[request.param]


def check_share(result: dict[str, Any]) -> None:
    """What every engine gives: plain V2's greedy tokens with prefills in chunks, preemptions and
    requests without drafts among the others, with predictions, under grammars and with thinking
    budgets that end inside of drafts; tokens of seeds, with chains where nothing is drafted; the
    answers to prompts that come in parts."""
    assert result["greedy"] == result["seeds"] == result["structured"] == result["predicted"] == []
    assert result["thoughts"] == []
    assert len(result["labels"]) == 7
    assert max(result["labels"]) < 1e-4
    assert result["accepted_thoughts"] > 4
    assert result["sessions"]
    assert result["preempted"] > 0
    assert result["accepted_predicted"] > 0
    steps, tokens = result["steps"]
    assert tokens > steps
    # The program compares the tokens of these itself, beside aborts.
    assert result["oracle_tokens_per_step"] > 1.1
    assert result["requests_left"] == result["blocks_lost"] == 0


def test_an_engines_share(result) -> None:
    check_share(result)


@pytest.mark.parametrize("name", ["trees", "synchronous trees"])
def test_trees_take_fewer_steps(results, name) -> None:
    steps, tokens = results[name]["steps"]
    assert tokens > 1.1 * steps


@pytest.mark.parametrize("name", ["asynchronous", "synchronous", "ahead"])
def test_chains_that_are_mostly_right_take_fewer_steps(results, name) -> None:
    assert results[name]["oracle_tokens_per_step"] > 1.3


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("trees", "random"),  # any sampling parameters, logprobs, late arrivals, aborts
        ("asynchronous", "faulty"),
        ("ahead", "faulty"),
        ("vllm", "differences"),  # its method `ngram`, with the plugin installed
    ],
)
def test_what_is_as_in_plain_v2(results, name, key) -> None:
    assert results[name][key] == []


@pytest.mark.parametrize("kernel", ["walks", "deliveries", "top tokens"])
def test_kernels_do_what_their_readable_twins_do(results, kernel) -> None:
    assert results[kernel] == []


@pytest.mark.parametrize("which", ["trees", "synchronous trees", "ahead"])
def test_outputs_come_with_the_trees_of_their_step(results, which) -> None:
    """In the demo and the benchmarks, which see each step's outputs; later steps are launched."""
    several, with_tree = results[which]["steps_with_trees"]
    assert several == with_tree > 3


def test_drafters_get_the_argmax_of_each_node(results) -> None:
    assert len(results["trees"]["argmax"]) > 5
    assert all(results["trees"]["argmax"])


def test_steps_ahead_of_their_drafts(results) -> None:
    result = results["ahead"]
    num_ahead, num_steps = result["ahead"]
    assert num_steps / 3 < num_ahead < num_steps
    num_early, num_prepared = result["early"]  # before faulty drafters, which prepare nothing
    assert num_steps / 8 < num_early == num_prepared < num_ahead


def test_drafters_read_the_logits_of_prompts(results) -> None:
    had_rows = results["synchronous trees"]["had_rows"]
    assert had_rows
    assert all(had_rows)


def test_asynchronous_scheduling_is_the_default_and_can_be_switched_off(results) -> None:
    is_async = {name: results[name]["async"] for name in ENGINES}
    assert is_async == {name: not name.startswith("synchronous") for name in ENGINES}


def test_drafters_that_fail(results) -> None:
    assert results["asynchronous"]["failures"]["error"] > 0
    assert results["asynchronous"]["failures"]["malformed"] > 0


def test_drafters_see_the_hidden_state_of_the_last_committed_token(results) -> None:
    with_drafts, without, common = results["asynchronous"]["hidden_states"]
    assert with_drafts < without <= 3 * 9  # the last token of a text has no draft
    assert common > with_drafts / 2
    assert results["asynchronous"]["hidden_states_error"] < 1e-4


def test_waits_for_the_device(results) -> None:
    """Counted in whole steps; documented in benchmarks/engine.md."""
    waits_of = {
        "plain": results["vllm"]["plain"],
        "ngram": results["vllm"]["ngram"],
        "chains": results["asynchronous"]["waits"],
        "trees": results["trees"]["waits"],
        "ahead": results["ahead"]["waits"],
    }
    assert {name: waits["step"][:2] for name, waits in waits_of.items()} == {
        "plain": [0, 3],  # with LoRA, where the adapters of a batch change
        "ngram": [0, 0],
        "chains": [0, 1],  # the first step has none before it
        "trees": [0, 1],
        "ahead": [0, 1],
    }
    of_outputs = {name: waits["output"][:2] for name, waits in waits_of.items()}
    assert of_outputs == {name: [1, 1] for name in waits_of}
    assert all(waits["step"][2] > 10 for waits in waits_of.values())
    # Outputs with log-probabilities, which random requests ask for, wait for more.
    waits = results["trees"]["random_waits"]
    assert waits["step"][1] == waits["output"][0] == 1


def test_a_step_verifies_what_was_drafted(chains) -> None:
    """vLLM schedules as many tokens for every request; without a draft it verifies one."""
    scheduled, verified = map(sum, zip(*chains["lengths"], strict=True))
    assert verified < scheduled - len(chains["lengths"])


def test_families_that_trees_cannot_serve(results) -> None:
    """Windows, soft caps, sinks, attention in chunks, positions of images."""
    assert {name: family["differences"] for name, family in results["families"].items()} == {
        name: [] for name in ("Gemma 2", "gpt-oss", "Llama 4", "Qwen 3 VL", "Qwen 3 MoE")
    }
    assert all(family["rejected"] > 0 for family in results["families"].values())
    assert sum(family["accepted"] for family in results["families"].values()) > 0
    for name in ("Qwen 3 VL", "gpt-oss"):
        assert results["families"][name]["score_error"] < 1e-4  # of native beams


def test_routed_experts_are_those_of_the_accepted_path(results) -> None:
    # The program also checks that searches, whose beams have no experts, are refused.
    assert not any(results["families"]["Qwen 3 MoE"]["other_experts"])


@pytest.mark.slow
def test_the_newer_vllm() -> None:
    """A part of the above: what stands on vLLM's own code. The plugin's drafters, kernels and
    deliveries, the families and the host's part of a step are the same there."""
    result = run_program("tests.engine.v2_run", "newer", **newer_vllm())
    check_share(result["ahead"])
    check_share(result["trees"])
    assert result["ahead"]["adapters"] == []
    assert result["ahead"]["salts"] == SALTS
    assert result["hypotheses"] == 16
    assert result["check"] == [None, True]
    assert result["image searches"] == 2
    # With trees of a trained drafter, prompts in parts, preemptions, a prefix cache and aborts, and
    # steps after which the scheduler wants no drafts.
    union = result["union"]
    assert union["own"]
    assert union["async"]
    assert union["greedy"] == []
    assert union["preempted"] > 0
    assert union["accepted"] > 0
    assert union["skipped"] > 0
    check_trees(result["eagle3"])
    check_trees(result["lilicorr"])  # a kind of DFlash, with candidates
    assert not any(union["failures"].values())
    assert union["blocks_lost"] == 0


def test_the_check_at_a_start_sees_faults(results) -> None:
    """In bfloat16, where tokens that are as likely may change places."""
    said = results["reasons"]
    assert said.pop("none") is None
    assert "RuntimeError: adapters of" in said.pop("adapters raise")
    assert all("of a test prompt is" in reason for reason in said.values()), said
    assert "masked" in said["shifted masks"]
    assert results["new launches"] == []  # a GPU has compiled all that verifies drafts


def test_low_precision_differs_at_near_ties_only(results) -> None:
    result = results["bfloat16"]
    assert all(margin is None or margin < 0.15 for margin in result["margins"])
    assert result["margins"].count(None) >= 3
    assert result["preempted"] > 0
    steps, tokens = result["steps"]
    assert tokens > 1.3 * steps


def test_trained_drafters_alone_accept_what_vllms_own_method_accepts(results) -> None:
    vllms, ours = results["alone"]["own"], results["alone"]["chains"]
    assert vllms["differences"] == ours["differences"] == []
    assert vllms["accepted"] == ours["accepted"] > 0


def test_trees_of_trained_drafters(results) -> None:
    """Greedy, seeded and beside structured outputs the tokens are plain V2's. The drafter predicts
    what it predicts after chains, and something else where accepted nodes stay in their places."""
    check_trees(results["alone"])


def check_trees(result: dict[str, Any]) -> None:
    chains, trees = result["chains"], result["trees"]
    assert trees["differences"] == []
    assert chains["agrees"]
    assert trees["agrees"]
    assert trees["accepted"] > 1.15 * chains["accepted"] > 0
    assert trees["error"] < 1e-4
    assert trees["unordered error"] > 1e-2


def test_waits_with_a_trained_drafter(results) -> None:
    """Those of vLLM's own method, and, after the first step, for the sampled tokens and the
    predictions; documented in benchmarks/engine.md."""
    (least, most, _), ours = (results["alone"][name]["waits"]["step"] for name in ("own", "chains"))
    assert (ours[0], ours[1]) == (least, most + 2)
    assert ours[2] > 10


@pytest.mark.parametrize("name", ["synchronous", "synchronous trees"])
def test_adapters_cache_salts_and_the_prefix_cache(results, name) -> None:
    """LoRA adapters in one batch; a request's draft may come from its adapter's and salt's text."""
    result = results[name]
    assert result["adapters"] == []
    assert result["salts"] == SALTS
    plain, drafting = result["cached"]
    assert plain > 0
    assert drafting > 0


def test_statistics(result) -> None:
    assert result["steps"][1] == result["tokens"]
    assert result["counted_tokens"] == result["all_tokens"]
    # Without places that had no draft; vLLM does not count what aborted requests had in flight.
    assert 0.9 * result["all_drafts"] < result["counted_drafts"] <= result["all_drafts"]
    # A failure is told at once, as if the step had a draft.
    most_trees = result["all_trees"] + result["num_failures"]
    assert 0.9 * result["all_trees"] < result["counted_trees"] <= most_trees


def test_the_text_stays_off_the_device(result) -> None:
    assert not result["dense_text"]


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, Any]:
    return run_program("tests.engine.v2_ranks", "chains, mp", "chains, stages", "chains, uni")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_steps_output_leaves_before_the_next_wait(on_ranks, executor) -> None:
    result = on_ranks[f"chains, {executor}"]
    assert result["differences"] == []
    order = result["order"]
    steps = order["steps"]
    assert steps > 20
    assert order["launched before sent"] == steps
    # With `mp` a thread of the worker's sends, which the system may keep waiting.
    assert order["sent before waited for"] >= (steps if executor == "uni" else 0.8 * steps)
    assert order["waited for before the next launch"] == steps - 1
    if executor == "uni":  # one thread: the order is certain
        assert order["output before the next wait"] == steps - 1


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_pause_waits_for_nothing(on_ranks, executor) -> None:
    result = on_ranks[f"pauses, chains, {executor}"]
    assert result["differences"] == []
    order = result["order"]
    assert order["steps"] > 20
    assert order["waits"] == 0
    if executor == "uni":  # with `mp` a launch on a CPU takes as long as the step
        assert order["launched before the output of the last"] == order["steps"] - 1


@pytest.mark.slow
def test_two_pipeline_stages_give_the_tokens_of_one(on_ranks) -> None:
    result = on_ranks["chains, stages"]
    assert result["differences"] == []
    assert result["async"]
    assert result["accepted"] > 5
    assert result["preempted"] > 0


def test_the_replay_model_gives_recorded_answers(results):
    prepared, unprepared = results["replayed"]
    assert prepared == unprepared > 2
