"""Predictions as requests bring them: what is refused, and what travels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.tokenizers import get_tokenizer

from vllm_trie.extras.predictions import request as module
from vllm_trie.extras.predictions.source import PREDICTION
from vllm_trie.hooks.frontend.request_options import with_packed_options
from vllm_trie.lab.tiny_model import model_path


@pytest.mark.parametrize(
    ("prediction", "allowed"),
    [
        (b"abc", "a text or a list of token ids"),
        (b"abcdabcd", "a text or a list of token ids"),
        ("\ud800", "text without lone surrogates"),
        ([1, 10**6], r"ids in \[0, 100\)"),
    ],
)
def test_predictions_that_cannot_be_read(prediction, allowed):
    """Bytes of token ids are how a prediction travels to the worker, which believes them."""
    model: Any = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100)
    params = SamplingParams(extra_args={PREDICTION: prediction})
    with pytest.raises(VLLMClientError, match=f"prediction: got .*, allowed is {allowed};"):
        with_packed_options(
            SimpleNamespace(model_config=model), params, get_tokenizer(model_path())
        )


def test_an_engine_without_drafts_drops_predictions(monkeypatch):
    """It says once that they do nothing."""
    said: list[str] = []
    monkeypatch.setattr(module.logger, "info_once", said.append)
    model: Any = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100)
    engine: Any = SimpleNamespace(model_config=model, speculative_config=None)
    params = SamplingParams(extra_args={PREDICTION: [1, 2, 3], "another": 5})
    assert with_packed_options(engine, params, None).extra_args == {"another": 5}
    assert len(said) == 1
    assert "predictions have no effect" in said[0]
