"""Engines that peers.py measures begin with what they are to know."""

from __future__ import annotations

import random

import peers
import pytest
from support import peers_engines

from tests.engine.benchmark_runs import RECORDED


@pytest.fixture
def learner(tmp_path):
    """Ask one and the same question of an engine whose drafter learns from finished requests."""
    rng = random.Random(5)
    prompt, answer = ([rng.randrange(10, 30_000) for _ in range(n)] for n in (20, 60))
    question = peers_engines.Question("any", prompt, answer, len(answer))
    with peers_engines.replaying("tiny", 32_000) as model:
        contestant = peers_engines.Contestant(
            RECORDED[-1],
            model,
            max_model_len=256,
            enforce_eager=True,
            **peers_engines.replay_settings("bfloat16"),
        )
        peers.play_answers(question)

        def ask(forget: bool = False) -> peers_engines.Measured:
            if forget:
                contestant.forget()
            return contestant.run(question)

        yield ask


def test_engines_learn_and_forget(learner):
    first, second, third = learner(), learner(), learner(forget=True)
    assert first.steps == 59, "random text cannot be guessed"
    assert second.steps < 30, "the answer was seen a moment ago"
    assert third.steps == 59, "the engine forgot"
    assert first.output == second.output == third.output
