"""The adaptive node budget, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_trie.drafts.budget import AcceptanceCalibration, NodeBudget, StepCost
from vllm_trie.drafts.budget.allocation import choose_nodes
from vllm_trie.tree import TokenTree


@st.composite
def trees(draw, max_nodes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Parents and path probabilities of a small tree."""
    size = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    probabilities: list[float] = []
    for parent in parents:
        edge = draw(st.floats(0.05, 1.0))
        probabilities.append(edge * (1.0 if parent < 0 else probabilities[parent]))
    return np.array(parents, dtype=np.int32), np.array(probabilities)


def best_allocation_reference(
    probabilities: Sequence[np.ndarray],
    parents: Sequence[np.ndarray],
    num_requests: int,
    seconds: np.ndarray,
) -> float:
    """Return the best rate over all sets of nodes that are trees, by trying them all."""
    nodes = [(r, i) for r, p in enumerate(probabilities) for i in range(len(p))]
    best = 0.0
    for size in range(len(nodes) + 1):
        for chosen in combinations(nodes, size):
            closed = all(parents[r][i] < 0 or (r, int(parents[r][i])) in chosen for r, i in chosen)
            if closed:
                tokens = num_requests + sum(float(probabilities[r][i]) for r, i in chosen)
                best = max(best, tokens / seconds[num_requests + size])
    return best


@given(
    st.lists(trees(), min_size=1, max_size=2),
    st.integers(0, 2),
    st.lists(st.floats(0.0, 0.5), min_size=20, max_size=20),
)
def test_allocation_is_the_best_of_all(forest, rows_without, slopes):
    parents = [p for p, _ in forest]
    probabilities = [p for _, p in forest]
    num_requests = len(forest) + rows_without
    seconds = 1.0 + np.cumsum(slopes)
    assume(any(map(len, probabilities)))
    rates = np.concatenate(probabilities)
    chosen, tokens_per_second = choose_nodes(rates, num_requests, seconds)
    best = best_allocation_reference(probabilities, parents, num_requests, seconds)
    assert tokens_per_second == pytest.approx(best)
    ends = np.cumsum([len(p) for p in parents])
    for keep, parent in zip(np.split(chosen, ends[:-1]), parents, strict=True):
        assert all(parent[i] < 0 or keep[parent[i]] for i in np.flatnonzero(keep))


def test_of_equally_likely_nodes_parents_come_first():
    """Six chains of four nodes, in a step that has room for 15 of them."""
    seconds = np.repeat([1.0, 9.0], [17, 9])
    chosen, _ = choose_nodes(np.tile([0.9, 0.5, 0.5, 0.5], 6), 1, seconds)
    assert chosen.tolist() == [True] * 12 + [True, False, False, False] * 3


Seconds = Mapping[int, float]
"""Duration of a step, by its tokens."""


def linear(slope: float, *sizes: int, start: float = 1.0) -> dict[int, float]:
    return {num_tokens: start + slope * num_tokens for num_tokens in sizes}


def step_cost(seconds: Seconds) -> StepCost:
    cost = StepCost()
    for num_tokens, took in seconds.items():
        cost.expect(num_tokens, took)
    return cost


def node_budget(seconds: Seconds, waits: bool = False) -> NodeBudget:
    budget = NodeBudget(waits)
    for num_tokens, took in seconds.items():
        budget.cost.expect(num_tokens, took)
    return budget


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 1.0)), min_size=2, max_size=60))
def test_step_cost_never_falls(measured):
    cost = StepCost()
    for num_tokens, seconds in measured:
        cost.observe(num_tokens, seconds)
    assume(cost.known)
    table = cost.table(400)
    assert (np.diff(table) >= 0).all()
    assert (table > 0).all()


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_step_cost_learns_what_passes_at_the_start_lack(factor):
    """Attention, by tokens, and the engine's own work; then another program runs."""
    cost = step_cost(linear(0.0004, 1, 8, 16, 17, 32, 33, 64, 128, start=0.02))
    rng = np.random.default_rng(0)
    for num_tokens in rng.integers(1, 60, size=900).tolist():
        noise = 1 + 0.1 * rng.standard_normal()
        cost.observe(num_tokens, factor * noise * (0.022 + 0.0006 * num_tokens))
    for num_tokens in (1, 20, 64, 128):
        assert cost(num_tokens) / cost(8) == pytest.approx(
            (0.022 + 0.0006 * num_tokens) / (0.022 + 0.0006 * 8), rel=0.08
        )
    assert cost(8) == pytest.approx(factor * (0.022 + 0.0006 * 8), rel=0.15)


def test_steps_that_fill_their_blocks_stay_cheap():
    cost = step_cost({1: 0.010, 16: 0.010, 17: 0.015, 32: 0.015})
    for _ in range(100):
        cost.observe(5, 0.020)
    assert cost(17) / cost(16) == pytest.approx(1.5, rel=0.02)


def test_sizes_that_are_not_measured_follow_the_measured_ones():
    cost = step_cost(linear(0.0004, 1, 8, 16, 32, start=0.02))
    for _ in range(30):
        cost.observe(12, 1.2 * (0.020 + 0.0004 * 12))
    for num_tokens in (1, 12, 32):
        assert cost(num_tokens) == pytest.approx(1.2 * (0.020 + 0.0004 * num_tokens), rel=0.02)


def test_neighbours_that_differ_by_noise_do_not_forbid_larger_steps():
    cost = step_cost({1: 4.0, 8: 6.0, 32: 10.0, 48: 16.0, 64: 21.0})
    assert cost(128) == pytest.approx(21.0 + 64 * (21.0 - 10.0) / 32)
    cost.lengthen(1.0)
    assert cost(8) == pytest.approx(7.0)
    cost.expect(8, 8.0)
    assert cost(8) == pytest.approx(8.0)


def test_one_interrupted_step_does_not_steer():
    cost = StepCost()
    for _ in range(50):
        cost.observe(1, 0.02)
        cost.observe(33, 0.03)
    cost.observe(33, 60.0)
    assert cost(33) < 0.04
    assert cost(33) / cost(1) == pytest.approx(1.5, rel=0.05)


def test_a_start_without_durations_is_corrected():
    cost = step_cost({1: 0.0, 8: 0.0})
    for _ in range(200):
        cost.observe(8, 0.02)
    assert cost(8) == pytest.approx(0.02)


def test_acceptance_corrects_an_overconfident_drafter():
    calibration = AcceptanceCalibration()
    rng = np.random.default_rng(0)
    predicted = np.full(32, 0.65)
    for _ in range(300):
        calibration.observe(predicted, np.flatnonzero(rng.random(32) < 0.2))
    assert calibration(predicted)[0] == pytest.approx(0.2, abs=0.03)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_calibrated_probabilities_stay_probabilities(predicted, seed):
    rng = np.random.default_rng(seed)
    calibration = AcceptanceCalibration()
    nodes = np.array(predicted)
    calibration.observe(nodes, np.flatnonzero(rng.random(len(nodes)) < nodes))
    calibrated = calibration(np.sort(nodes))
    assert ((calibrated >= 0) & (calibrated <= 1)).all()


@given(st.integers(0, 2**32 - 1), st.lists(st.floats(0.0, 0.97), min_size=1, max_size=20))
def test_predictions_are_those_that_meet_expectations(seed, expected):
    rng = np.random.default_rng(seed)
    calibration = AcceptanceCalibration()
    observed = rng.random(500)
    calibration.observe(observed, np.flatnonzero(rng.random(500) < observed**2))
    highest = calibration(np.array([1.0]))[0]
    for rate in expected:
        predicted = calibration.predicted_for(rate)
        assert 0.0 <= predicted <= 1.0
        if rate < highest:
            assert calibration(np.array([predicted]))[0] == pytest.approx(rate, abs=1e-9)


def _chain(probabilities):
    size = len(probabilities)
    return TokenTree.from_lists(range(size), range(-1, size - 1), probabilities)


def test_nothing_is_cut_before_costs_are_known():
    tree = _chain([0.9, 0.8, 0.001])
    assert NodeBudget().cut([tree], 1)[0].num_nodes == 3


def test_nodes_are_spent_while_they_are_cheap_and_saved_when_dear():
    tree = _chain([0.9, 0.7, 0.3, 0.05, 0.01])
    budgets = [node_budget(linear(slope, 1, 2, 4, 8, 16)) for slope in (0.0, 0.01, 0.1, 9.0)]
    sizes = [budget.cut([tree], 1)[0].num_nodes for budget in budgets]
    assert (sizes[0], sizes[-1]) == (5, 0)
    assert sizes == sorted(sizes, reverse=True)


@given(
    st.floats(0.001, 0.5),
    st.integers(1, 40),
    st.lists(st.lists(st.floats(0.3, 1.0), min_size=1, max_size=8), min_size=1, max_size=6),
)
def test_what_need_not_be_drafted_would_have_been_cut(slope, num_rows, edges):
    """Where a node costs the same at every size, nothing is lost by the least probability."""
    budget = node_budget(linear(slope, 1, 16, 64, 256, 1024))
    trees = [_chain(np.cumprod(tree).tolist()) for tree in edges]
    num_rows = max(num_rows, len(trees))
    least = budget.least_probability(num_rows)
    for tree in budget.cut(trees, num_rows):
        assert tree.num_nodes == 0 or tree.probabilities.min() > least
    assert 0.0 < least <= 1.0


def test_a_large_batch_asks_for_likelier_nodes():
    assert NodeBudget().least_probability(1) == 0.0  # no costs are known
    budget = node_budget(linear(0.02, 1, 16, 64, 256))
    least = [budget.least_probability(num_rows) for num_rows in (1, 4, 16, 32)]
    assert least == sorted(least)
    assert least[0] < least[-1] / 4
    budget.observe_unwaited(1, 0.5 * budget.cost(1))
    assert budget.least_probability(1) > least[0]


def test_nodes_that_fill_a_block_are_drafted():
    budget = node_budget({1: 0.010, 16: 0.010, 17: 0.015, 32: 0.015, 64: 0.025})
    assert budget.least_probability(8) == 0.0
    assert budget.cut([_chain([0.05])] * 8, 8)[0].num_nodes == 1


@pytest.mark.parametrize(("drafted", "kept"), [(32, 32), (31, 15), (20, 15)])
def test_nodes_that_fill_faster_blocks_are_drafted(drafted, kept):
    """As oneDNN's products in AMX tiles: 17 to 32 rows take longer than 33."""
    budget = node_budget({1: 0.010, 16: 0.010, 17: 0.014, 32: 0.014, 33: 0.011, 48: 0.012})
    tree = TokenTree.from_lists(range(drafted), [-1] * drafted, [1 / drafted] * drafted)
    for _ in range(100):
        budget.observe_step(kept + 1, 0.03)
    assert budget.cut([tree], 1)[0].num_nodes == kept


def test_cut_trees_are_the_likeliest_subtrees():
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, -1, 2], [0.5, 0.02, 0.4, 0.3])
    (cut,) = node_budget(linear(0.1, 1, 2, 4, 8, start=0.9)).cut([tree], 1)
    assert cut.token_ids.tolist() == [1, 3, 4]
    assert cut.parents.tolist() == [-1, -1, 1]
    cut.validate(10, 4)


def test_trees_without_probabilities_stay_whole():
    plain = TokenTree.from_lists([1, 2], [-1, 0])
    kept = node_budget(linear(1.0, 1, 2, 4, 8, start=0.0)).cut([plain, _chain([0.1])], 2)
    assert [tree.num_nodes for tree in kept] == [2, 0]
    budget = node_budget({1: 0.010, 16: 0.010, 17: 0.015, 32: 0.015})
    filling = TokenTree.from_lists(range(14), [-1] * 14)  # the block of two requests
    assert [tree.num_nodes for tree in budget.cut([filling, _chain([0.3])], 2)] == [14, 0]


def test_a_tree_that_stays_whole_has_paid_for_the_wait():
    budget = node_budget(linear(0.02, 1, 2, 4), waits=True)
    budget.expect_wait(0.5, 1.0)
    plain, likely, unlikely = TokenTree.from_lists([1], [-1]), _chain([0.8]), _chain([0.001])
    assert [tree.num_nodes for tree in budget.cut([likely], 1)] == [0]
    assert [tree.num_nodes for tree in budget.cut([plain, likely, unlikely], 3)] == [1, 1, 0]


def _costly_engine(drafting_seconds: float) -> NodeBudget:
    budget = node_budget(linear(1.0, 1, 2, 4, 8, start=0.0))
    for _ in range(100):
        budget.observe_drafting(drafting_seconds)
    return budget


def test_drafting_pauses_longer_and_longer_and_wakes_up():
    budget = _costly_engine(drafting_seconds=0.1)
    calls = 0
    for _ in range(300):
        if budget.should_draft(1):
            calls += 1
            budget.cut([_chain([0.05])], 1)
    assert 20 < calls < 35
    for _ in range(60):
        budget.observe_step(2, 1.0)
        budget.observe_step(4, 1.0)
    while not budget.should_draft(1):
        pass
    budget.cut([_chain([0.99, 0.99])], 1)
    assert budget.should_draft(1)
    budget.cut([_chain([0.05])], 1)
    assert budget.pause[0] > 1, "one lucky draft does not end the caution"


@pytest.mark.parametrize(("num_rows", "ends"), [(1, True), (5, False), (12, False), (16, True)])
def test_a_pause_ends_when_the_batch_is_another_one(num_rows, ends):
    budget = _costly_engine(drafting_seconds=1.0)
    for _ in range(40):
        if budget.should_draft(8):
            budget.cut([_chain([0.05])] * 8, 8)
    while budget.should_draft(8):
        budget.cut([_chain([0.05])] * 8, 8)
    assert budget.should_draft(num_rows) == ends


def test_drafting_that_costs_nothing_goes_on():
    budget = _costly_engine(drafting_seconds=0.001)
    for _ in range(50):
        assert budget.should_draft(1)
        assert budget.cut([_chain([0.05])], 1)[0].num_nodes == 0


def test_drafting_that_waits_pauses_whatever_it_costs():
    for trees in ([_chain([0.05])], [TokenTree.empty()]):
        budget = _costly_engine(drafting_seconds=0.0)
        budget.drafting_waits = True
        calls = 0
        for _ in range(300):
            if budget.should_draft(1):
                calls += 1
                budget.cut(trees, 1)
        assert 5 < calls < 20


@pytest.mark.parametrize("waits", [False, True])
def test_steps_in_which_nobody_may_draft_teach_nothing(waits):
    """The last steps of answers, answers of one token, and prefills in chunks."""
    budget = _costly_engine(drafting_seconds=1.0)
    budget.drafting_waits = waits
    before = vars(budget).copy()
    for num_rows in (1, 1, 0, 1):
        assert budget.cut([], num_rows) == []
    assert vars(budget) == before


@pytest.mark.parametrize(("seconds", "keeps"), [(1.02, 1), (0.9, 1), (0.7, 0), (1e-9, 0)])
def test_drafts_are_weighed_against_steps_that_nobody_waits_for(seconds, keeps):
    budget = node_budget(linear(0.02, 1, 2, 4), waits=True)
    for _ in range(100):
        budget.observe_unwaited(1, seconds)
    assert budget.cut([_chain([0.3])], 1)[0].num_nodes == keeps
    budget.observe_unwaited(0, 1.0)  # prefills among its tokens
    for _ in range(100):
        budget.observe_unwaited(1, 1.02)
    assert budget.cut([_chain([0.3])], 1)[0].num_nodes == 1


def test_nothing_pauses_to_measure_what_other_pauses_have():
    budget = node_budget(linear(0.02, 1, 2, 4), waits=True)
    for _ in range(600):
        budget.observe_unwaited(1, 1.02)
        budget.cut([_chain([0.9])], 1)
        assert budget.should_draft(1)


class _Device(NamedTuple):
    """Seconds of a step of a batch.

    Attributes:
        plain, waited: Without nodes, and of one that the host waits for.
        node: Of each node.
        drafting: Of the host.
    """

    num_rows: int = 1
    plain: float = 8e-3
    waited: float = 8.8e-3
    node: float = 1e-5
    drafting: float = 2e-4


def _decode(
    budget: NodeBudget,
    num_steps: int,
    edge: float,
    device: _Device = _Device(),  # noqa: B008
    chain: np.ndarray | None = None,
    share_drafted: float = 1.0,
    busy: bool = False,
    varies: bool = False,
    seed: int = 0,
) -> tuple[float, float]:
    """Decode; return the nodes a step and request, and the speed, with plain decoding's as 1.

    Args:
        edge: Probability of each node, given its parent.
        chain: What the drafter predicts for the nodes.
        share_drafted: Of the requests, for which the drafter finds a chain.
        busy: Other programs make steps up to four times longer, for forty steps on average, and
            interrupt some of them.
        varies: Whether some chains are likelier than others.
    """
    rng = np.random.default_rng(seed)
    num_rows, chain = device.num_rows, edge ** np.arange(1, 9) if chain is None else chain
    kept, num_ahead = [TokenTree.empty()] * num_rows, 0
    seconds, num_tokens, total, load = 0.0, 0, 0, 1.0
    for _ in range(num_steps):
        if busy and rng.random() < 1 / 40:
            load = rng.choice([1.0, 2.0, 4.0])
        num_nodes = sum(tree.num_nodes for tree in kept)
        total += num_nodes
        drafts = budget.should_draft(num_rows)
        right = [range(min(rng.geometric(1.0 - edge) - 1, tree.num_nodes)) for tree in kept]
        num_tokens += num_rows + sum(map(len, right))
        if drafts or num_nodes or not budget.drafting_waits:
            budget.observe_verified(kept, right)
            took = (device.waited + device.node * num_nodes) * load
            took *= 1 + (rng.exponential(0.8) if load > 1 else 0.0)
            if not (drafts and num_ahead):  # that step began behind others
                budget.observe_step(num_rows + num_nodes, took)
            num_ahead = 0
        else:
            num_ahead += 1
            took = device.plain
            if num_ahead > 2:
                budget.observe_unwaited(num_rows, took)
        seconds += took
        kept = [TokenTree.empty()] * num_rows
        if drafts:
            seconds += device.drafting * load
            budget.observe_drafting(device.drafting * load)
            predicted = chain ** (rng.uniform(0.5, 2.0) if varies else 1.0)
            likely = _chain(predicted[predicted >= budget.least_probability(num_rows)].tolist())
            drafted = rng.random(num_rows) < share_drafted
            kept = budget.cut([likely if has else TokenTree.empty() for has in drafted], num_rows)
    return total / num_steps / num_rows, num_tokens * device.plain / num_rows / seconds


def _v2_budget() -> NodeBudget:
    return node_budget(linear(1e-5, 1, 8, 16, 32, start=8e-3), waits=True)


def test_pauses_do_not_outlive_a_change_of_load():
    budget, loaded = _v2_budget(), _Device(plain=24e-3, waited=26.4e-3, node=3e-5)
    _decode(budget, 500, 0.75, loaded)
    _decode(budget, 300, 0.02, loaded)
    assert _decode(budget, 700, 0.02)[0] < 0.1
    assert _decode(budget, 2000, 0.5)[0] > 4.0


def test_what_waits_cost_is_learned_without_a_refused_draft():
    assert _decode(_v2_budget(), 2000, 0.15, _Device(waited=10.7e-3))[0] < 0.5


ON_A_GPU = {
    1: _Device(1, 4.97e-3, 7.15e-3, 0.48e-3 / 8, 0.5e-3),
    8: _Device(8, 5.27e-3, 8.14e-3, 0.76e-3 / 64, 1.0e-3),
    32: _Device(32, 6.27e-3, 9.31e-3, 4.99e-3 / 256, 2.0e-3),
}
"""Measured on an H200 with an 8B Llama in bfloat16, by requests."""


def _gpu_budget() -> NodeBudget:
    """A budget that expects what forward passes take, and the wait that the start measures."""
    passes = {1: 4.8e-3, 8: 5.0e-3, 32: 5.6e-3, 72: 6.1e-3, 128: 7.2e-3, 288: 11.0e-3}
    budget = node_budget(passes, waits=True)
    budget.expect_wait(5.1e-3, 7.6e-3)
    return budget


@pytest.mark.parametrize("num_rows", ON_A_GPU)
def test_a_wait_is_paid_for_from_the_first_step_on(num_rows):
    """Speed of plain decoding without repetition, and a gain where texts repeat themselves."""
    device = ON_A_GPU[num_rows]
    assert _decode(_gpu_budget(), 300, 0.02, device, share_drafted=0.0)[1] > 0.95
    _, unlikely = _decode(_gpu_budget(), 300, 0.2, device)
    assert unlikely > 0.95
    _, wrong = _decode(_gpu_budget(), 2000, 0.02, device, 0.4 ** np.arange(1, 9), share_drafted=0.2)
    assert wrong > 0.95
    nodes, speed = _decode(_gpu_budget(), 300, 0.75, device)
    assert nodes > 3.0
    assert speed > 1.3


def test_a_gain_smaller_than_the_cost_of_drafting_is_none():
    for drafting_seconds, keeps in ((0.01, 1), (0.5, 0)):
        budget = node_budget(linear(0.02, 1, 2, 4))
        for _ in range(200):
            budget.observe_drafting(drafting_seconds)
        assert budget.cut([_chain([0.2])], 1)[0].num_nodes == keeps


def _machine(
    num_rows: int, start: float = 3e-3, node: float = 1.2e-4
) -> tuple[NodeBudget, _Device]:
    """Return a machine where nothing waits, and a budget that expects its steps."""
    plain = start + node * num_rows
    sizes = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 257)
    return node_budget(linear(node, *sizes, start=start)), _Device(
        num_rows, plain, plain, node, drafting=3e-4
    )


PREDICTED = np.array([0.9, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15])


@pytest.mark.parametrize(("num_rows", "enough"), [(1, 6.0), (8, 2.5), (32, 0.9)])
def test_rejected_probabilities_are_tried_again(num_rows, enough):
    """A text where no draft is right, then one where nearly all are."""
    budget, device = _machine(num_rows)
    assert _decode(budget, 1000, 0.02, device, PREDICTED)[0] < 1.8
    _decode(budget, 1000, 0.95, device, PREDICTED)  # long enough to find out
    assert _decode(budget, 100, 0.95, device, PREDICTED)[0] > enough


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("seed", range(4))
def test_other_work_on_the_machine_does_not_change_the_choice(num_rows, seed):
    steps = 1500, 0.7
    budget, device = _machine(num_rows)
    quiet = _decode(budget, *steps, device, PREDICTED, varies=True)[0]
    budget, _ = _machine(num_rows)
    busy = _decode(budget, *steps, device, PREDICTED, busy=True, varies=True, seed=seed)[0]
    assert busy == pytest.approx(quiet, rel=0.15)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_sizes_that_once_seemed_slow_are_tried_again(num_rows):
    """Something else kept the machine busy whenever larger steps were measured."""
    budget, device = _machine(num_rows)
    for _ in range(200):
        budget.observe_step(num_rows, device.plain)
        budget.observe_step(9 * num_rows, 8 * (device.plain + 8 * num_rows * device.node))
    assert _decode(budget, 100, 0.95, device, PREDICTED)[0] < 0.1
    _decode(budget, 8000, 0.95, device, PREDICTED)
    assert _decode(budget, 100, 0.95, device, PREDICTED)[0] > 2.5


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_wrong_proportions_at_the_start_are_corrected(factor):
    budget, device = _machine(8)
    for num_tokens in (16, 17, 32, 33, 64, 65, 128, 257):
        budget.cost.expect(num_tokens, factor * (3e-3 + 1.2e-4 * num_tokens))
    _decode(budget, 4000, 0.65, device)
    assert _decode(budget, 100, 0.65, device)[0] > 1.5


def test_sizes_that_are_slow_are_seldom_tried():
    budget, device = _machine(1, start=0.0, node=3e-3)
    assert _decode(budget, 8000, 0.5, device, PREDICTED)[0] < 0.03
