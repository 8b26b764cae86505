"""Without any other draft, tokens that a grammar forces are accepted."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.engine.compare import accepted_tokens, differences, generate, plain_outputs, speculation
from tests.engine.prompts import prompts
from tests.engine.test_sampling import COMPACT, STRUCTURED
from vllm_trie.drafts.engine.scheduler.next_drafts import FirstTokens

pytestmark = pytest.mark.usefixtures("test_drafters")
COUNT = 8


def test_forced_tokens_leave_the_outputs_as_they_are(engine, monkeypatch):
    def leave_no_draft(self: FirstTokens) -> bool:
        for request in self._scheduler.running:
            request.spec_token_ids = []
        return True

    monkeypatch.setattr(FirstTokens, "remove_drafts", leave_no_draft)
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=STRUCTURED)
    expected = plain_outputs(engine(**COMPACT), prompts(COUNT), params)
    tree = engine(**speculation("test_oracle", 24), **COMPACT)
    outputs = generate(tree, prompts(COUNT), params)
    assert differences(expected, outputs) == []
    assert accepted_tokens(tree) > COUNT
