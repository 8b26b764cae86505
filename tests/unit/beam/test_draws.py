"""Draws next to the model: the distribution of the search's own draws over whole rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.unit.beam.models import extended, random_model, run_search
from vllm_trie.searches import BeamSearch, SearchSettings
from vllm_trie.searches.blocks import TokenRules
from vllm_trie.searches.top_k import launch_draws

VOCAB = 6
NUM_SEARCHES = 2000


def run_drawn(
    next_logprobs: Callable[[list[int]], np.ndarray],
    search_settings: SearchSettings,
    rules: TokenRules | None = None,
) -> BeamSearch:
    """Drive a search whose candidates are drawn out of all rows together."""
    search = BeamSearch(search_settings)
    rows: list[list[int]] = [[]]
    while not search.done:
        logits = torch.from_numpy(np.stack([next_logprobs(row) for row in rows]))
        draws = search.draws(0)
        assert draws is not None
        drawn = launch_draws(
            logits, search.totals, search_settings.num_candidates, rules, draws
        ).fetch()
        places = [*zip(drawn.rows.tolist(), (-drawn.logprobs).tolist(), strict=True)]
        assert places == sorted(places)
        rows = extended(rows, search.advance(drawn))
    return search


def outcomes(run: Callable[[int], BeamSearch]) -> Counter[tuple[tuple[int, ...], ...]]:
    return Counter(
        tuple(tuple(hypothesis.token_ids) for hypothesis in run(seed).hypotheses())
        for seed in range(NUM_SEARCHES)
    )


@pytest.mark.parametrize(("width", "temperature"), [(1, 1.0), (2, 1.6)])
def test_distribution(width, temperature):
    """Pearson's test that two samples have one distribution, over all hypotheses of a search."""
    model = random_model(3, peaked=0.5)

    def next_logprobs(tokens: list[int]) -> np.ndarray:
        logprobs = model(tokens)[:VOCAB].astype(np.float64)
        return (logprobs - np.logaddexp.reduce(logprobs)).astype(np.float32)

    def settings(seed: int) -> SearchSettings:
        return SearchSettings(width, 2, (0,), do_sample=True, seed=seed, temperature=temperature)

    host = outcomes(lambda seed: run_search(next_logprobs, settings(seed), prompt=(), vocab=VOCAB))
    device = outcomes(lambda seed: run_drawn(next_logprobs, settings(seed + NUM_SEARCHES)))
    frequent = [key for key, count in (host + device).items() if count >= 20]
    left, right = (np.array([sample[key] for key in frequent]) for sample in (host, device))
    statistic = ((left - right) ** 2 / (left + right)).sum()
    assert len(frequent) > 8
    assert statistic < len(frequent) + 5 * np.sqrt(2 * len(frequent))


def test_a_search_is_reproducible_and_its_steps_differ():
    model = random_model(4)
    search_settings = SearchSettings(7, 5, do_sample=True, seed=11)  # more than the first row has
    first, second = (
        run_drawn(model, search_settings).hypotheses(),
        run_drawn(model, search_settings).hypotheses(),
    )
    assert [hypothesis.token_ids for hypothesis in first] == [
        hypothesis.token_ids for hypothesis in second
    ]
    search = BeamSearch(search_settings)
    seeds = {search.draws(row).seed for row in range(3)}
    assert len(seeds) == 3


def test_rules_and_rows_that_are_no_numbers():
    allowed = np.array([[0b110110]], dtype=np.int32)
    rules = TokenRules(np.array([1]), np.array([50.0], dtype=np.float32), allowed)
    logits = torch.zeros(2, VOCAB)
    logits[1] = torch.nan
    draws = BeamSearch(SearchSettings(3, 2, do_sample=True, seed=1)).draws(0)
    drawn = launch_draws(logits, np.zeros(2, dtype=np.float32), 6, rules, draws).fetch()
    possible = drawn.keys > -np.inf
    assert sorted(drawn.token_ids[possible]) == [1, 2, 4, 5]
    assert (drawn.rows[possible] == 0).all()
    assert drawn.token_ids[drawn.keys.argmax()] == 1
    np.testing.assert_allclose(drawn.logprobs[possible], -np.log(VOCAB), rtol=1e-6)
