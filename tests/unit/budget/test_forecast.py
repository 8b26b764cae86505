"""Places for drafts of steps that are launched ahead of them."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_trie.drafts.budget import DraftForecast, StepCost, planned_lengths


def cost_of(seconds: dict[int, float]) -> StepCost:
    cost = StepCost()
    for num_tokens, duration in seconds.items():
        cost.expect(num_tokens, duration)
    return cost


FREE = cost_of({1: 1.0, 100: 1.0})
DEAR = cost_of({1: 1.0, 100: 100.0})
FAIR = cost_of({2: 1.0, 102: 6.0})
"""A token more makes a step of two 5 % longer."""


def test_a_forecast_follows_the_drafts_of_its_request():
    forecast = DraftForecast(4)
    assert forecast("new").tolist() == [1.0] * 4
    for _ in range(20):
        rates = {"long": [0.9, 0.8, 0.7, 0.6], "short": [0.5], "none": []}
        forecast.observe({name: np.array(values) for name, values in rates.items()})
    assert forecast("long") == pytest.approx([0.9, 0.8, 0.7, 0.6], abs=1e-3)
    assert forecast("short") == pytest.approx([0.5, 0.0, 0.0, 0.0], abs=1e-3)
    assert forecast("none") == pytest.approx([0.0] * 4, abs=1e-3)
    average = forecast("new")
    assert (np.diff(average) <= 0).all()
    assert 0.0 < average[3] < average[0] < 0.7
    forecast.release("long")
    assert forecast("long") is forecast("new")


def test_places_go_to_the_drafts_that_are_worth_them():
    rates = [np.array([0.9, 0.8, 0.7, 0.6]), np.array([0.3, 0.01, 0.0, 0.0])]
    assert planned_lengths(rates, FREE)[0] == 4
    assert planned_lengths(rates, DEAR) == [0, 0]
    assert planned_lengths(rates, FAIR) == [4, 1]


def test_whole_drafts_are_planned_until_costs_are_known():
    assert planned_lengths([np.zeros(4), np.zeros(2)], StepCost()) == [4, 2]
    assert planned_lengths([np.zeros(0)], FREE) == [0]
