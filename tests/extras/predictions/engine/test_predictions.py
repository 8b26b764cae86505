"""Searches ignore predictions, and refuse wrong ones."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.engine.beam.cases import prompt


def searching(**options):
    extra_args = {"beam_width": 4, **options}
    return SamplingParams(n=4, temperature=0.0, max_tokens=12, extra_args=extra_args)


def test_a_search_ignores_a_prediction(engine):
    llm = engine(block_size=32, max_model_len=512, max_num_seqs=64)
    source = {"prompt_token_ids": list(prompt(5, 40))}
    given = (searching(), searching(prediction=[5, 6, 7] * 9))
    plain, predicted = llm.generate([source] * 2, given, use_tqdm=False)
    assert [o.token_ids for o in predicted.outputs] == [o.token_ids for o in plain.outputs]
    assert not hasattr(predicted.outputs[0], "accepted_prediction_tokens")
    for wrong, shown in ((5, "5"), (b"abc", "b'abc'"), ("\ud800", r"'\\ud800'")):
        with pytest.raises(ValueError, match=f"prediction: got {shown}, allowed is .*text"):
            llm.generate([source], searching(prediction=wrong), use_tqdm=False)
