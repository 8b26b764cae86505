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


@pytest.fixture(params=["synchronous", "asynchronous"])
def result(request: pytest.FixtureRequest, results: dict[str, Any]) -> dict[str, Any]:
    return results[request.param]


@pytest.fixture(params=["trees", "synchronous trees"])
def trees(request: pytest.FixtureRequest, results: dict[str, Any]) -> dict[str, Any]:
    return results[request.param]


def test_trees_give_the_greedy_tokens_of_plain_v2(trees) -> None:
    """Prefills in chunks, preemptions, requests without drafts among the others.

    The synchronous engine's trees are those of `trie_union` with Medusa heads.
    """
    assert trees["greedy"] == []
    assert trees["preempted"] > 0
    steps, tokens = trees["greedy_steps"]
    assert tokens > 1.1 * steps


def test_trees_give_the_sampled_tokens_of_plain_v2(results) -> None:
    assert results["trees"]["seeds"] == []
    steps, tokens = results["trees"]["seeds_steps"]
    assert tokens > steps


@pytest.mark.parametrize("which", ["trees", "synchronous trees", "ahead"])
def test_outputs_come_with_the_trees_of_their_step(results, which) -> None:
    """In the demo and the benchmarks, which see each step's outputs; later steps are launched."""
    several, with_tree = results[which]["steps_with_trees"]
    assert several == with_tree > 3


@pytest.mark.parametrize("which", ["trees", "synchronous trees", "synchronous", "asynchronous"])
def test_streaming_input(results, which) -> None:
    assert results[which]["sessions"]


def test_trees_beside_structured_outputs(results) -> None:
    assert results["trees"]["structured"] == []


def test_predictions_with_trees(results) -> None:
    assert results["trees"]["predicted"] == []
    assert results["trees"]["accepted_predicted"] > 0


def test_random_requests_with_trees(results) -> None:
    """Any sampling parameters, logprobs, late arrivals, aborts."""
    assert results["trees"]["random"] == []


def test_drafters_get_the_argmax_of_each_node(results) -> None:
    assert len(results["trees"]["argmax"]) > 5
    assert all(results["trees"]["argmax"])


@pytest.mark.parametrize("kernel", ["walks", "deliveries", "top tokens"])
def test_kernels_do_what_their_readable_twins_do(results, kernel) -> None:
    assert results[kernel] == []


def test_steps_ahead_of_their_drafts(results) -> None:
    """Greedy tokens are plain V2's, beside structured outputs, aborts and faulty drafters, too."""
    result = results["ahead"]
    assert result["greedy"] == result["structured"] == result["predicted"] == result["faulty"] == []
    assert result["preempted"] > 0
    assert result["accepted_predicted"] > 0
    assert result["oracle_tokens_per_step"] > 1.3
    num_ahead, num_steps = result["ahead"]
    assert num_steps / 3 < num_ahead < num_steps
    num_early, num_prepared = result["early"]  # before faulty drafters, which prepare nothing
    assert num_steps / 8 < num_early == num_prepared < num_ahead
    assert result["waits"]["step"][:2] == [0, 1]
    assert result["requests_left"] == result["blocks_lost"] == 0


def test_drafters_read_the_logits_of_prompts(results) -> None:
    had_rows = results["synchronous trees"]["had_rows"]
    assert had_rows
    assert all(had_rows)


def test_trees_leave_nothing(trees) -> None:
    assert trees["requests_left"] == trees["blocks_lost"] == 0


def test_asynchronous_scheduling_is_the_default_and_can_be_switched_off(results) -> None:
    expected = {
        "asynchronous": True,
        "synchronous": False,
        "trees": True,
        "synchronous trees": False,
    }
    assert {name: results[name]["async"] for name in expected} == expected


def test_plain_v2_gives_the_tokens_of_plain_v1(results) -> None:
    assert results["v1"] == []


def test_greedy_tokens_are_those_of_plain_v2(result) -> None:
    """Prefills in chunks, preemptions, requests without drafts among the others.

    The synchronous engine's chains are those of `trie_union` with Medusa heads.
    """
    assert result["greedy"] == []
    assert result["preempted"] > 0
    assert result["stats"]["steps"] < result["stats"]["tokens"]


def test_greedy_tokens_beside_aborts_where_most_drafts_are_right(result) -> None:
    # The program compares the tokens itself.
    assert result["oracle_tokens_per_step"] > 1.3


def test_beam_searches_beside_chains(results) -> None:
    assert results["asynchronous"]["beams"] == []


def test_seeds(result) -> None:
    """Without a draft, the tokens are plain V2's; with one, only their distribution is."""
    assert result["seeds"] == []


def test_structured_outputs(result) -> None:
    assert result["structured"] == []


def test_predictions(result) -> None:
    assert result["predicted"] == []
    assert result["accepted_predicted"] > 0


def test_drafters_that_fail(results) -> None:
    assert results["asynchronous"]["faulty"] == []
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
    }
    assert {name: waits["step"][:2] for name, waits in waits_of.items()} == {
        "plain": [0, 3],  # with LoRA, where the adapters of a batch change
        "ngram": [0, 0],
        "chains": [0, 1],  # the first step has none before it
        "trees": [0, 1],
    }
    # Those of the random requests with log-probabilities, which only `trees` has, wait for more.
    assert all(waits["output"][0] == 1 for waits in waits_of.values())
    assert all(waits_of[name]["output"][1] == 1 for name in ("plain", "ngram", "chains"))
    assert all(waits["step"][2] > 10 for waits in waits_of.values())


def test_a_step_verifies_what_was_drafted(result) -> None:
    """vLLM schedules as many tokens for every request; without a draft it verifies one."""
    lengths = result["lengths"]
    assert lengths["filled"] == 0
    assert lengths["undrafted"] > 3
    assert lengths["verified"] < lengths["scheduled"] - 1


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
    for name in ("ahead", "trees"):
        drafting = result[name]
        assert drafting["greedy"] == drafting["seeds"] == drafting["structured"] == []
        assert drafting["preempted"] > 0
        steps, tokens = drafting["steps"]
        assert tokens > steps
        assert drafting["blocks_lost"] == 0
    assert result["ahead"]["adapters"] == []
    assert result["ahead"]["salts"] == SALTS
    assert result["hypotheses"] == 16
    assert result["check"] == [None, True]
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


@pytest.mark.parametrize("name", ["chains", "trees"])
def test_recorded_text_from_a_model_of_an_8bs_shapes(results, name) -> None:
    result = results["replayed"][name]
    assert all(result["is_text"])
    assert result["preempted"] > 0
    steps, tokens = result["steps"]
    assert tokens > 1.3 * steps


def test_vllms_own_ngrams_draft_beside_the_plugin(results) -> None:
    assert results["vllm"]["differences"] == []


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
    assert result["stats"]["tokens"] == result["tokens"]
    assert result["counted_tokens"] == result["all_tokens"]
    # Without places that had no draft; vLLM does not count what aborted requests had in flight.
    assert 0.9 * result["all_drafts"] < result["counted_drafts"] <= result["all_drafts"]
    # A failure is told at once, as if the step had a draft.
    most_trees = result["all_trees"] + result["num_failures"]
    assert 0.9 * result["all_trees"] < result["counted_trees"] <= most_trees


def test_nothing_is_left_and_the_text_stays_off_the_device(result) -> None:
    assert result["requests_left"] == result["blocks_lost"] == 0
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
