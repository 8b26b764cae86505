"""What parts say becomes what is true."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.extras.union.calibration import Calibrator

PROBABILITIES = st.floats(0.0, 1.0)


def test_a_part_alone_is_believed_at_first():
    assert Calibrator().probability({3: 0.3}, 1) == pytest.approx(0.3)


@given(PROBABILITIES, PROBABILITIES)
def test_likelier_edges_stay_likelier(low, high):
    low, high = sorted((low, high))
    calibrator = Calibrator()
    assert calibrator.probability({0: low}, 2) <= calibrator.probability({0: high}, 2)


def test_agreement_counts_and_doubt_too():
    calibrator = Calibrator()
    alone = calibrator.probability({0: 0.4}, 1)
    assert calibrator.probability({0: 0.4, 1: 0.4}, 2) > alone
    assert calibrator.probability({0: 0.4}, 2) < alone


@pytest.mark.parametrize("said", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("true", [0.2, 0.7])
def test_a_part_that_is_wrong_is_corrected(said, true):
    calibrator, rng = Calibrator(), random.Random(0)
    corrected = []
    for step in range(6000):
        calibrator.learn({0: said}, 1, rng.random() < true)
        if step >= 3000:
            corrected.append(calibrator.probability({0: said}, 1))
    assert sum(corrected) / len(corrected) == pytest.approx(true, abs=0.06)


def test_the_part_that_knows_is_followed():
    """One part knows what is right in each case, the other guesses at random."""
    calibrator, rng = Calibrator(), random.Random(1)
    for _ in range(4000):
        true = rng.choice([0.1, 0.9])
        edges = {0: true, 1: rng.choice([0.1, 0.9])}
        calibrator.learn(edges, 2, rng.random() < true)
    assert calibrator.probability({0: 0.9, 1: 0.1}, 2) > 0.75
    assert calibrator.probability({0: 0.1, 1: 0.9}, 2) < 0.25


def test_what_is_learned_of_some_parts_says_nothing_of_others():
    calibrator = Calibrator()
    for _ in range(200):
        calibrator.learn({0: 0.5}, 1, False)
    assert calibrator.probability({0: 0.5}, 1) < 0.3
    assert calibrator.probability({1: 0.5}, 1) == pytest.approx(0.5)
    assert calibrator.probability({0: 0.5, 1: 0.5}, 2) > 0.5
