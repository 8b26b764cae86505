"""Members of a beam request: requests that the engine never runs."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from vllm_trie.vllm_hooks.frontend.requests import prepare_params
from vllm_trie.vllm_hooks.ledger.installation import Installation
from vllm_trie.vllm_hooks.ledger.table import patches_here

TARGET = "vllm.v1.request:Request.from_engine_core_request"


@pytest.fixture
def patched():
    installation = Installation()
    stock = vars(Request)["from_engine_core_request"]
    if not hasattr(Request.from_engine_core_request, "__wrapped__"):  # by the plugin itself
        (patch,) = (each for each in patches_here("beam") if each.target == TARGET)
        installation.apply(patch)
    yield
    installation.undo()
    assert vars(Request)["from_engine_core_request"] is stock


def made(params: SamplingParams, hashed: list[str]) -> Request:
    def hasher(request: Request) -> list[bytes]:
        hashed.append(request.request_id)
        return []

    request = EngineCoreRequest(
        "0_a", [1, 2, 3], None, params, None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    result = Request.from_engine_core_request(request, hasher)
    assert result.request_id == "0_a"
    assert result._block_hasher is hasher
    return result


def test_prompts_of_members_are_not_hashed(patched):
    hashed: list[str] = []
    made(prepare_params(SamplingParams(n=2, extra_args={"beam_width": 4})), hashed)
    assert not hashed
    made(SamplingParams(), hashed)
    assert hashed == ["0_a"]
