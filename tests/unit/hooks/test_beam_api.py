"""``use_beam_search`` of the server: what the native path makes of vLLM's call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import BeamSearchParams

from vllm_trie.searches.engine.frontend import beam_api


@pytest.fixture
def generated(monkeypatch) -> list[tuple[Any, ...]]:
    """The requests that the engine gets."""
    monkeypatch.setattr(beam_api, "reason_off", lambda vllm_config: None)
    return []


def search(generated: list[tuple[Any, ...]], params: BeamSearchParams) -> None:
    def generate(*request: Any, **options: Any) -> None:
        generated.append(request)

    client = SimpleNamespace(generate=generate, vllm_config=None)
    serving: Any = SimpleNamespace(engine_client=client)
    original: Any = None
    beam_api.search_online(original, serving, {"type": "token"}, "cmpl-a", params)


def test_prompts_of_a_request_have_ids_of_their_own(generated):
    """vLLM passes one id, which it keeps with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION."""
    for _ in range(2):
        search(generated, BeamSearchParams(beam_width=2, max_tokens=4, temperature=1.0))
    ids = [request_id for _, _, request_id in generated]
    assert len(set(ids)) == 2
    assert all(request_id.startswith("cmpl-a-") for request_id in ids)


def test_logprobs_of_a_transcription(generated):
    """Of `verbose_json`; vLLM sets them on the parameters."""
    params = BeamSearchParams(beam_width=2, max_tokens=4, temperature=1.0)
    search(generated, params)
    params.logprobs = 1  # type: ignore[attr-defined]
    search(generated, params)
    assert [of_search.logprobs for _, of_search, _ in generated] == [None, 1]
