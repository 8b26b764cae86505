"""Replacements of vLLM's functions through which searches pass in the front end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_trie.hooks.frontend.answers import ALL, answered_within
from vllm_trie.hooks.ledger.record import of_beams
from vllm_trie.hooks.start.limits import switch_off
from vllm_trie.hooks.wire import SEARCH_KEY, ReadyResponse, extra_args_of
from vllm_trie.searches.engine.frontend.hypotheses import ServerCall, served
from vllm_trie.searches.engine.frontend.requests import (
    check_api_request,
    check_processed,
    prepare_request,
)

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.engine.input_processor import InputProcessor


@of_beams("v1.engine.input_processor:InputProcessor.", scope="process").wraps(
    "process_inputs", "checks beam requests before they reach the engine"
)
def process_beams(
    original: Callable[..., EngineCoreRequest],
    self: InputProcessor,
    request_id: str,
    prompt: object,
    params: object,
    *args: object,
    **kwargs: object,
) -> EngineCoreRequest:
    prepared = prepare_request(self.vllm_config, params)
    request = original(self, request_id, prompt, prepared, *args, **kwargs)
    check_processed(self.vllm_config, request)
    return request


@of_beams("sampling_params:SamplingParams.", scope="process").wraps(
    "_verify_greedy_sampling", "allows n above 1 at temperature 0 for beam requests"
)
def verify_greedy_sampling(original: Callable[..., None], self: SamplingParams) -> None:
    # Copies that the engine makes of a checked request carry the key in place of the options.
    if extra_args_of(self).keys().isdisjoint(("beam_width", SEARCH_KEY)):
        original(self)


@of_beams("v1.engine.core_client:MPClient.").wraps(
    "_apply_ready_response", "hears why the engine has no native beam search"
)
def apply_ready_response(original: Callable[..., None], self: MPClient, payload: bytes) -> None:
    original(self, payload)
    if payload:
        response = msgspec.msgpack.decode(payload, type=ReadyResponse)
        if response.beams_off is not None:  # of one engine of several, which may get any search
            switch_off(self.vllm_config, response.beams_off)


async def _answer(
    original: Callable[..., Any], self: Any, request: Any, *args: object, **kwargs: object
) -> Any:
    """Check a beam request that came as ``vllm_xargs``; add the field ``beams`` to an answer whose
    choices are hypotheses of searches.

    It has an entry for each choice, in their order: what ``CompletionOutput.beam`` has offline,
    with null for infinite numbers, which JSON does not have.
    """
    if not getattr(request, "use_beam_search", False):
        check_api_request(request)
    call = ServerCall(request, [])
    answer = await answered_within(served, call, original, self, request, *args, **kwargs)
    beams = [beam for search in call.searches for beam in search.beams]
    if beams and hasattr(answer, "choices"):
        answer.beams = [
            {name: value if _is_json(value) else None for name, value in beam.items()}
            for beam in beams
        ]
    return answer


def _is_json(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


for _name in ALL:
    of_beams("entrypoints.openai.").wraps(
        _name, "checks beam requests; answers with the scores of hypotheses"
    )(_answer)
